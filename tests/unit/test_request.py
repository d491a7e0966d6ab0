"""Every field of a request against everything that can be wrong with it."""

import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from python_backend_models.request import (
    FIELDS,
    TRITON_PARAMETERS,
    InvalidRequestError,
    SongRequest,
    parse_request,
)

Array = np.ndarray
GOOD = {"caption": "Warm folk", "lyrics": "[Verse]\nla la"}


def text(value: str | bytes) -> Array:
    return np.array([value.encode() if isinstance(value, str) else value], dtype=np.object_)


def fields(**changed: Array | None) -> dict[str, Array | None]:
    return {name: text(value) for name, value in GOOD.items()} | changed


def refusal(sent: dict[str, Array | None], parameters: dict[str, object] | None = None) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        parse_request(sent, parameters or {})
    return str(caught.value)


def test_defaults() -> None:
    assert parse_request(fields(), {}) == SongRequest(
        caption="Warm folk", lyrics="[Verse]\nla la", seed=0, max_frames=None, audio_encoding="f32"
    )
    unsent = dict.fromkeys(("seed", "max_frames", "audio_encoding"))
    assert parse_request(fields(**unsent), {}) == parse_request(fields(), {})


def test_everything_sent() -> None:
    sent = fields(
        seed=np.array([2**63 - 1], dtype=np.int64),
        max_frames=np.array([9000], dtype=np.int32),
        audio_encoding=text("s16_base64"),
    )
    request = parse_request(sent, {})
    assert (request.seed, request.max_frames, request.audio_encoding) == (2**63 - 1, 9000, "s16_base64")
    assert type(request.seed) is int
    assert type(request.max_frames) is int


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1])
def test_seeds_in_range(seed: int) -> None:
    assert parse_request(fields(seed=np.array([seed], dtype=np.int64)), {}).seed == seed


@pytest.mark.parametrize("frames", [1, 25, 9000])
def test_caps_in_range(frames: int) -> None:
    assert parse_request(fields(max_frames=np.array([frames], dtype=np.int32)), {}).max_frames == frames


SHAPES: dict[str, Callable[[Array], Array]] = {
    "no axis": lambda array: array.reshape(()),
    "no element": lambda array: array[:0],
    "two elements": lambda array: np.concatenate([array, array]),
    "a batch axis": lambda array: array[None],
}
WELL_FORMED = {
    "caption": text("x"),
    "lyrics": text("x"),
    "seed": np.array([1], dtype=np.int64),
    "max_frames": np.array([1], dtype=np.int32),
    "audio_encoding": text("f32"),
}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_wrong_shape(name: str, shape: str) -> None:
    array = SHAPES[shape](WELL_FORMED[name])
    message = refusal(fields(**{name: array}))
    assert message == f"{name}: its shape is '{list(array.shape)}', must be [1]"


@pytest.mark.parametrize("name", ["caption", "lyrics"])
def test_required(name: str) -> None:
    assert refusal(fields(**{name: None})).startswith(f"{name}: missing")
    assert refusal({other: text(value) for other, value in GOOD.items() if other != name}).startswith(name)


@pytest.mark.parametrize("name", ["caption", "lyrics"])
@pytest.mark.parametrize("blank", ["", " ", "\n\t\r ", "\u3000\u2028\xa0", "\x1f"])
def test_blank(name: str, blank: str) -> None:
    assert refusal(fields(**{name: text(blank)})).startswith(f"{name}: blank")


@pytest.mark.parametrize("name", ["caption", "lyrics", "audio_encoding"])
@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (b"ab\xff", "not valid UTF-8 at byte 2"),
        (b"ab\xc3", "not valid UTF-8 at byte 2"),
        (b"\xc0\x80", "not valid UTF-8 at byte 0"),
        (b"\xed\xa0\x80", "not valid UTF-8 at byte 0"),  # a lone surrogate
        (b"\xf5\x80\x80\x80", "not valid UTF-8 at byte 0"),
        (b"ab\x00c", "has a NUL character at 2"),
        ("a\ud800", "not valid UTF-8 at byte 1"),  # what a Python caller may put into the array
    ],
)
def test_not_text(name: str, value: bytes | str, problem: str) -> None:
    array = np.array([value], dtype=np.object_)
    assert refusal(fields(**{name: array})).startswith(f"{name}: {problem}")


@pytest.mark.parametrize("name", ["caption", "lyrics", "audio_encoding"])
@pytest.mark.parametrize(
    ("array", "found"),
    [(np.array([1], dtype=np.int32), "int32"), (np.array([1.5]), "float64"), (np.array([None]), "NoneType")],
)
def test_not_a_string(name: str, array: Array, found: str) -> None:
    assert refusal(fields(**{name: array})) == f"{name}: its type is '{found}', must be STRING"


@pytest.mark.parametrize("name", ["seed", "max_frames"])
@pytest.mark.parametrize(
    "array",
    [
        np.array([1.0]),
        np.array([True]),
        np.array([b"1"], dtype=np.object_),
        np.array([1], dtype=np.uint64),
        np.array([1], dtype=np.int16),
    ],
)
def test_not_the_integer_type(name: str, array: Array) -> None:
    wanted = {"seed": "INT64", "max_frames": "INT32"}[name]
    assert re.fullmatch(rf"{name}: its type is '\w+', must be {wanted}", refusal(fields(**{name: array})))


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("seed", -1, "0 to 9223372036854775807"),
        ("seed", -(2**63), "0 to 9223372036854775807"),
        ("max_frames", 0, "1 to 9000"),
        ("max_frames", -1, "1 to 9000"),
        ("max_frames", 9001, "1 to 9000"),
        ("max_frames", 2**31 - 1, "1 to 9000"),
    ],
)
def test_out_of_range(name: str, value: int, allowed: str) -> None:
    array = np.array([value], dtype=WELL_FORMED[name].dtype)
    assert refusal(fields(**{name: array})) == f"{name}: {value} is out of range; allowed: {allowed}"


@pytest.mark.parametrize(("name", "most"), [("caption", 20_000), ("lyrics", 100_000)])
def test_length_limits_count_characters(name: str, most: int) -> None:
    for character in ("a", "é", "漢", "🎵"):
        assert len(getattr(parse_request(fields(**{name: text(character * most)}), {}), name)) == most
        assert f"at most {most} characters" in refusal(fields(**{name: text(character * (most + 1))}))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["caption", "lyrics", "audio_encoding"])
def test_a_megabyte_is_refused_unread(name: str) -> None:
    for unit in (b"a", b"[", b"\n", b"\xff", b"\x00", "漢".encode()):
        message = refusal(fields(**{name: text(unit * (2**20 // len(unit)))}))
        assert message.startswith(f"{name}: ")
        assert len(message) < 200


@pytest.mark.parametrize("value", ["", "F32", "f32 ", "wav", "s16_base64\n", "x" * 100])
def test_unknown_encoding(value: str) -> None:
    message = refusal(fields(audio_encoding=text(value)))
    assert message.startswith("audio_encoding: ")
    assert message.endswith("allowed: f32, s16, s16_base64")


@pytest.mark.parametrize("caption", ["---", "<||>", "*** ", "   ***\n\n___", "## \n- ", "<| |><||>", "    "])
def test_caption_that_cleans_to_nothing(caption: str) -> None:
    assert refusal(fields(caption=text(caption))).startswith("caption: ")


def test_cleaning_to_nothing_is_judged_by_the_profile() -> None:
    sent = fields(caption=text("a\x1f- \n".replace("a", "<||>")))
    assert parse_request(sent, {}, profile="vllm-omni").caption
    with pytest.raises(InvalidRequestError, match="caption"):
        parse_request(sent, {}, profile="sglang-omni")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("caption", "<|<|im_end|>|>"),
        ("caption", "[[[[]]]]"),
        ("lyrics", "<|im_end|><|audio_start|>"),
        ("lyrics", "[[[[]]]]"),
        ("lyrics", "[Verse]\n[Chorus]"),
        ("lyrics", "\ufeffla"),
    ],
)
def test_odd_text_is_still_text(name: str, value: str) -> None:
    assert getattr(parse_request(fields(**{name: text(value)}), {}), name) == value


@pytest.mark.parametrize(
    "name",
    [
        *("temperature", "top_p", "top_k", "repetition_penalty", "cfg_scale", "voice", "speed", "ref_audio"),
        *("language", "stream", "Temperature", "", "sequence", "triton", "x\ny", "x" * 5000),
    ],
)
@pytest.mark.parametrize("value", [1.0, None, ""])
def test_parameters_are_refused_by_name(name: str, value: object) -> None:
    message = refusal(fields(), {"priority": 1, name: value})
    assert message.startswith(repr(name)[:40])
    assert "cannot honour" in message
    assert len(message) < 250
    assert "\n" not in message


@pytest.mark.parametrize("name", FIELDS)
def test_fields_sent_as_parameters(name: str) -> None:
    assert refusal(fields(), {name: "x"}).startswith(f"{name}: sent as a request parameter")


def test_triton_parameters_pass() -> None:
    own = dict.fromkeys([*TRITON_PARAMETERS, "triton_enable_empty_final_response"], 1)
    assert parse_request(fields(), own) == parse_request(fields(), {})


def test_unknown_input() -> None:
    assert refusal(fields(temperature=np.array([1.0]))).startswith("'temperature': no such input")


ANYTHING = st.one_of(
    st.none(),
    st.binary(max_size=40).map(text),
    st.text(max_size=40).map(text),
    st.sampled_from(["f32", "s16", "[Verse]\nla"]).map(text),
    st.integers(-(2**63), 2**63 - 1).map(lambda n: np.array([n], dtype=np.int64)),
    st.integers(-5, 9005).map(lambda n: np.array([n], dtype=np.int32)),
    st.floats().map(lambda x: np.array([x])),
    st.lists(st.binary(max_size=3), max_size=3).map(lambda x: np.array(x, dtype=np.object_)),
)


@given(
    st.dictionaries(st.sampled_from(FIELDS), ANYTHING),
    st.dictionaries(st.text(max_size=8), st.integers(), max_size=1),
)
@settings(max_examples=500)
def test_any_request_is_parsed_or_refused(
    sent: dict[str, Array | None], parameters: dict[str, object]
) -> None:
    try:
        request = parse_request(sent, parameters)
    except InvalidRequestError as error:
        message = str(error)
        assert message.isprintable()
        assert len(message) < 300
        return
    assert request.caption.strip()
    assert request.lyrics.strip()
    assert 0 <= request.seed < 2**63
    assert request.max_frames is None or 1 <= request.max_frames <= 9000
    assert request.audio_encoding in ("f32", "s16", "s16_base64")
