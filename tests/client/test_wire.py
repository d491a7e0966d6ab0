"""Requests byte for byte as tritonclient's own classes write them; responses that break the protocol."""

import numpy as np
import pytest
import tritonclient.grpc as triton
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from client import InvalidRequest, ServerError
from client.wire import SongReader, build_request, split_url
from tests.client.fake_server import chunk_message, final_message, song_audio

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


def tritonclient_inputs(values: dict[str, tuple[str, object]]) -> list[tuple[str, str, list[int], bytes]]:
    """The oracle: name, type, shape and bytes of inputs made by tritonclient's InferInput."""
    inputs = []
    for name, (datatype, value) in values.items():
        tensor = triton.InferInput(name, [1], datatype)
        dtype = {"BYTES": np.object_, "INT32": np.int32, "INT64": np.int64}[datatype]
        tensor.set_data_from_numpy(np.array([value], dtype=dtype))
        described = tensor._get_tensor()
        inputs.append((described.name, described.datatype, list(described.shape), tensor._get_content()))
    return inputs


@settings(deadline=None)
@given(
    caption=TEXT,
    lyrics=TEXT,
    seed=st.integers(-(2**63), 2**63 - 1),
    max_frames=st.integers(-(2**31), 2**31 - 1),
    encoding=st.sampled_from(["f32", "s16"]),
)
def test_request_is_what_tritonclient_would_send(
    caption: str, lyrics: str, seed: int, max_frames: int, encoding: str
) -> None:
    request = build_request(
        caption=caption,
        lyrics=lyrics,
        seed=seed,
        max_frames=max_frames,
        audio_encoding=encoding,
        model="music3",
        request_id="7",
    )
    sent = [
        (tensor.name, tensor.datatype, list(tensor.shape), raw)
        for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
    ]
    assert sent == tritonclient_inputs(
        {
            "caption": ("BYTES", caption.encode()),
            "lyrics": ("BYTES", lyrics.encode()),
            "seed": ("INT64", seed),
            "max_frames": ("INT32", max_frames),
            "audio_encoding": ("BYTES", encoding.encode()),
        }
    )
    assert request.parameters["triton_enable_empty_final_response"].bool_param
    assert service_pb2.ModelInferRequest.FromString(request.SerializeToString()) == request


def make(**changes: object) -> service_pb2.ModelInferRequest:
    values = {"caption": "a", "lyrics": "b", "seed": 0, "max_frames": None, "audio_encoding": "f32"}
    return build_request(**(values | {"model": "music3", "request_id": "1"} | changes))


def test_absent_cap_is_not_sent() -> None:
    assert "max_frames" not in [tensor.name for tensor in make().inputs]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("caption", None),
        ("lyrics", b"bytes"),
        ("lyrics", "lone \ud800 surrogate"),
        ("seed", 1.5),
        ("seed", True),
        ("seed", "3"),
        ("seed", 2**63),
        ("max_frames", 2**31),
        ("max_frames", -(2**31) - 1),
        ("max_frames", 10.0),
        ("audio_encoding", "mp3"),
    ],
)
def test_value_that_no_tensor_can_hold_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        make(**{field: value})


def reader(encoding: str = "s16") -> SongReader:
    return SongReader(audio_encoding=encoding, url="here:8001", model="music3", request_id="1")


def test_final_flag_on_the_last_chunk_itself() -> None:
    song = reader()
    chunk = song.read(
        chunk_message(
            "1", song_audio(1, 0), encoding="s16", progress=(1, 9), finish_reason="stop", final=True
        )
    )
    assert chunk is not None
    assert (chunk.frames_done, chunk.frame_cap, chunk.finish_reason) == (1, 9, "stop")
    assert song.final
    song.end()


def test_final_without_a_finish_reason_is_an_error() -> None:
    song = reader()
    song.read(chunk_message("1", song_audio(100, 0), encoding="s16", progress=(100, 250)))
    song.read(final_message("1"))
    with pytest.raises(ServerError, match="after 100 frames"):
        song.end()


@pytest.mark.parametrize("shape", [(8,), (4, 1), (2, 2, 2)])
def test_audio_of_another_shape_is_an_error(shape: tuple[int, ...]) -> None:
    audio = np.zeros(shape, np.int16)
    with pytest.raises(ServerError, match="audio"):
        reader().read(chunk_message("1", audio, encoding="s16", progress=(1, 1)))


def test_float_chunks_keep_their_values() -> None:
    chunk = reader("f32").read(chunk_message("1", song_audio(3, 5), encoding="f32", progress=(3, 3)))
    assert chunk is not None
    assert chunk.audio.dtype == np.float32
    np.testing.assert_array_equal(chunk.audio * 32768, song_audio(3, 5))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("localhost:8001", ("localhost:8001", False)),
        ("grpc://host:1", ("host:1", False)),
        ("grpcs://host:443/", ("host:443", True)),
    ],
)
def test_urls(url: str, expected: tuple[str, bool]) -> None:
    assert split_url(url) == expected


def test_http_url_is_refused_with_advice() -> None:
    with pytest.raises(InvalidRequest, match="8001"):
        split_url("http://localhost:8000")
