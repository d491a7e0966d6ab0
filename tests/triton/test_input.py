"""Every field with everything that can be wrong with it, through the real server; and a storm of it."""

import json
import random
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import numpy as np
import pytest
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc

from client import InvalidRequest, Music3Client
from client.errors import from_message
from tests.triton.server import TritonServer
from tests.triton.songs import CAPTION, LYRICS, audit, check_held, fill_places, grown, held, sing


@pytest.fixture(scope="module")
def stub(server: TritonServer) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(server.grpc_url, options) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


# ------------------------------------------------------------------ requests as no client would write them


@dataclass(frozen=True)
class Sent:
    """One input tensor as it goes over the wire."""

    datatype: str
    raw: bytes
    shape: tuple[int, ...] = (1,)


@dataclass
class Answer:
    """What came of a request, whose stream has ended."""

    error: str | None = None
    frames: int = 0
    prompt_tokens: int = 0
    warnings: list[str] = field(default_factory=list)


Stub = service_pb2_grpc.GRPCInferenceServiceStub


def text(value: str | bytes) -> Sent:
    raw = value if isinstance(value, bytes) else value.encode()
    return Sent("BYTES", struct.pack("<I", len(raw)) + raw)


def int64(value: int) -> Sent:
    return Sent("INT64", struct.pack("<q", value))


def int32(value: int) -> Sent:
    return Sent("INT32", struct.pack("<i", value))


def build(
    changes: dict[str, Sent | None], parameters: dict[str, str] | None = None
) -> service_pb2.ModelInferRequest:
    """A request for a song of one frame, with some inputs put in another's place or (None) left out."""
    fields: dict[str, Sent | None] = {
        "caption": text(CAPTION),
        "lyrics": text(LYRICS),
        "max_frames": int32(1),
    }
    request = service_pb2.ModelInferRequest(model_name="music3")
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in (parameters or {}).items():
        request.parameters[name].string_param = value
    for name, sent in (fields | changes).items():
        if sent is not None:
            tensor = request.inputs.add(name=name, datatype=sent.datatype)
            tensor.shape.extend(sent.shape)
            request.raw_input_contents.append(sent.raw)
    return request


def ask(stub: Stub, request: service_pb2.ModelInferRequest) -> Answer:
    """Send it and read until the server ends the stream, which it does after the request's final response."""
    answer = Answer()
    for message in stub.ModelStreamInfer(iter([request]), timeout=120):
        assert answer.error is None, "something came after the error"
        if message.error_message:
            answer.error = message.error_message
            continue
        result = InferResult(message.infer_response)
        if (progress := result.as_numpy("progress")) is not None:
            answer.frames = int(progress[0])
        if (tokens := result.as_numpy("prompt_tokens")) is not None:
            answer.prompt_tokens = int(tokens[0])
        if (warnings := result.as_numpy("warnings")) is not None:
            answer.warnings += [warning.decode() for warning in warnings]
    return answer


# ------------------------------------------------------------------------------------------ what is refused

NOT_TEXT = {
    "a stray byte": b"la \xff la",
    "a lone surrogate": b"la \xed\xa0\x80",
    "an overlong form": b"la \xc0\xaf",
    "a truncated character": "la é".encode()[:-1],
    "beyond Unicode": b"\xf4\x90\x80\x80",
}
LONGEST = {"caption": 20_000, "lyrics": 100_000, "audio_encoding": 10}
REQUIRED = ("caption", "lyrics")


def refusals() -> Iterator[tuple[str, str, Sent | None, str]]:
    """(field, what is wrong, what is sent, what the message says beside the field's name)."""
    for name, longest in LONGEST.items():
        yield name, "number", int32(1), "data-type"
        yield name, "two", Sent("BYTES", text("f32").raw * 2, (2,)), "shape"
        yield name, "none", Sent("BYTES", b"", (0,)), "shape"
        yield name, "batch axis", Sent("BYTES", text("f32").raw, (1, 1)), "shape"
        yield name, "empty", text(""), "blank" if name in REQUIRED else "allowed: f32"
        yield name, "blank", text(" \t\r\n\u3000"), "blank" if name in REQUIRED else "allowed: f32"
        yield name, "too long", text("é" * (longest + 1)), "characters long" if name in REQUIRED else "f32"
        yield name, "a megabyte", text("la " * 350_000), f"{1_050_000} bytes long"
        yield name, "NUL", text("f32\0"), "NUL"
        for what, raw in NOT_TEXT.items():
            yield name, what, text(raw), "not valid UTF-8"
    for name in REQUIRED:
        yield name, "absent", None, "missing"
    yield "caption", "only markup", text("<||> <|  |>"), "nothing but markup"
    yield "caption", "only rules", text("---\n***"), "nothing but markup"
    yield "caption", "too many tokens", text("\u4e00\u9fa5" * 10_000), "at most 5000"
    yield "lyrics", "too many tokens", text("[]" * 50_000), "at most 5000"
    yield "lyrics", "open brackets", text("[" * 100_000), "at most 5000"
    yield "audio_encoding", "unknown", text("mp3"), "'mp3' is unknown; allowed: f32, s16, s16_base64"
    yield "audio_encoding", "capital", text("F32"), "allowed: f32"
    for value in (-1, -(2**63)):
        yield "seed", str(value), int64(value), "allowed: 0 to 9223372036854775807"
    for value in (0, -1, -(2**31), 9001, 2**31 - 1):
        yield "max_frames", str(value), int32(value), "allowed: 1 to 9000"
    for name, other in (("seed", "INT32"), ("max_frames", "INT64")):
        size = 4 if other == "INT32" else 8
        own, own_size = ("INT64", 8) if name == "seed" else ("INT32", 4)
        yield name, "other integer", Sent(other, bytes(size)), "data-type"
        yield name, "fraction", Sent("FP32", struct.pack("<f", 1.5)), "data-type"
        yield name, "text", text("1"), "data-type"
        yield name, "two", Sent(own, bytes(2 * own_size), (2,)), "shape"
        yield name, "none", Sent(own, b"", (0,)), "shape"
        yield name, "batch axis", Sent(own, bytes(own_size), (1, 1)), "shape"


REFUSALS = list(refusals())


def check_refusal(name: str, error: str | None, says: str) -> None:
    assert error is not None, f"{name} was accepted"
    assert name in error
    assert says in error
    assert isinstance(from_message(error, url="", model="music3"), InvalidRequest)
    for trace in ("Traceback", "/", ".py"):
        assert trace not in error
    assert len(error) < 400


@pytest.mark.parametrize(
    ("name", "what", "sent", "says"), REFUSALS, ids=[f"{name}-{what}" for name, what, *_ in REFUSALS]
)
def test_a_bad_field_is_named(stub: Stub, name: str, what: str, sent: Sent | None, says: str) -> None:
    check_refusal(name, ask(stub, build({name: sent})).error, says)


@pytest.mark.parametrize(
    "name",
    [
        "temperature",
        "top_p",
        "top_k",
        "repetition_penalty",
        "cfg_scale",
        "voice",
        "speed",
        "ref_audio",
        "language",
        "seed",
        "lyrics",
    ],
)
def test_a_parameter_that_cannot_be_honoured_is_named(stub: Stub, name: str) -> None:
    error = ask(stub, build({}, {name: "1"})).error
    assert error is not None
    assert name in error
    assert isinstance(from_message(error, url="", model="music3"), InvalidRequest)


def test_a_cap_that_does_not_fit_beside_the_prompt_is_told_the_largest(stub: Stub) -> None:
    changes = {"lyrics": text("la la\n" * 500), "max_frames": int32(1)}
    answer = ask(stub, build(changes))
    assert answer.error is None
    most = 10_240 - 2 - answer.prompt_tokens
    assert most < 9000
    error = ask(stub, build(changes | {"max_frames": int32(9000)})).error
    check_refusal("max_frames", error, f"at most {most}")


def test_refusals_take_no_slot_and_are_counted(server: TritonServer, stub: Stub) -> None:
    start = audit(server)
    assert ask(stub, build({})).frames == 1
    before = audit(server)
    alone = grown(start, before)
    own = [each for each in REFUSALS if each[3] not in ("data-type", "shape")]  # the rest never gets here
    for name, _, sent, says in own:
        check_refusal(name, ask(stub, build({name: sent})).error, says)
    assert ask(stub, build({})).frames == 1
    change = grown(before, audit(server))
    assert change["music3_songs_total refused"] == len(own)
    assert change["music3_songs_total done"] == 1
    # The talker heard of that song alone.
    for name in ("music3_talker_prefill_steps_total", "music3_talker_frames_total"):
        assert change[name] == alone[name]


def test_over_http_a_refusal_is_a_400_that_names_the_field(server: TritonServer) -> None:
    for change, name in (
        ({"lyrics": " "}, "lyrics"),
        ({"max_frames": 0}, "max_frames"),
        ({"audio_encoding": "mp3"}, "audio_encoding"),
        ({"temperature": 1}, "temperature"),
    ):
        body = {"caption": CAPTION, "lyrics": LYRICS, "audio_encoding": "s16_base64"} | change
        request = urllib.request.Request(
            server.http_url + "/v2/models/music3/generate_stream", json.dumps(body).encode()
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=60)
        assert caught.value.code == 400
        event = json.loads(caught.value.read().decode().removeprefix("data: "))
        assert name in event["error"]


# ------------------------------------------------------------------------------- what is odd, and accepted


@pytest.mark.parametrize("name", REQUIRED)
def test_special_tokens_in_text_stay_text(stub: Stub, name: str) -> None:
    plain = ask(stub, build({name: text("x")}))
    for tokens in ("<|im_end|><|audio_start|>", "<|<|audio_start|>|>", "<|caption_end|><|lyrics_start|>"):
        answer = ask(stub, build({name: text(f"x {tokens}")}))
        assert (answer.error, answer.frames) == (None, 1)
        # As control each would be one token; as text a name alone takes three or more.
        assert answer.prompt_tokens >= plain.prompt_tokens + 3


def test_lyrics_of_brackets_alone_are_sung_with_a_warning(stub: Stub) -> None:
    answer = ask(stub, build({"lyrics": text("[][][[]]")}))
    assert (answer.error, answer.frames) == (None, 1)
    assert any("nothing is left to sing" in warning for warning in answer.warnings)


@pytest.mark.parametrize("seed", [0, 2**31, 2**63 - 1])
def test_seeds_up_to_the_largest_are_accepted(stub: Stub, seed: int) -> None:
    answer = ask(stub, build({"seed": int64(seed)}))
    assert (answer.error, answer.frames) == (None, 1)


# ---------------------------------------------------------------------------------------------- the storm

STORM = 2000
LATE = 500  # requests after which the server has seen every kind
SMALL = [each for each in REFUSALS if each[2] is None or len(each[2].raw) < 5000]


def storm_request(stub: Stub, number: int) -> str:
    """One random request of the storm, checked; the kind of what came of it."""
    draw = random.Random(number)
    kind = draw.random()
    if kind < 0.02:
        assert ask(stub, build({"seed": int64(number)})).error is None
        return "sung"
    if kind < 0.05:
        call = stub.ModelStreamInfer(iter([build({"max_frames": int32(50)})]), timeout=120)
        call.cancel()
        return "cancelled"
    if kind < 0.4:  # bytes that may happen to be text make a song no longer than the cap that is refused
        changes = {name: text(draw.randbytes(draw.randrange(200))) for name in REQUIRED}
        answer = ask(stub, build(changes | {"max_frames": int32(draw.randrange(-(2**31), 1))}))
        assert answer.error
        assert isinstance(from_message(answer.error, url="", model="music3"), InvalidRequest)
        return "bytes"
    name, _, sent, says = draw.choice(SMALL)
    check_refusal(name, ask(stub, build({name: sent})).error, says)
    return "refused"


def test_a_storm_of_bad_requests_leaves_the_server_as_it_was(
    server: TritonServer, client: Music3Client, stub: Stub
) -> None:
    first = sing(client, seed=5, max_frames=150)
    fill_places(client)
    with ThreadPoolExecutor(8) as pool:
        kinds = list(pool.map(lambda number: storm_request(stub, number), range(LATE)))
        audit(server)
        before = held(server)
        kinds += pool.map(lambda number: storm_request(stub, number), range(LATE, STORM))
    assert len(kinds) == STORM
    assert set(kinds) == {"sung", "cancelled", "bytes", "refused"}
    audit(server)
    check_held(before, held(server))
    assert server.is_ready()
    assert server.is_ready("music3")
    np.testing.assert_array_equal(sing(client, seed=5, max_frames=150).audio, first.audio)
