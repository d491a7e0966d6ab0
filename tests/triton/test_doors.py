"""Every way into the server: doors that sing, doors that can't, and whatever JSON is pushed through them."""

import http.client
import json
from base64 import b64decode

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2_grpc

from client import Music3Client
from python_backend_models.contract import CONTEXT_RESERVE_TOKENS, CONTEXT_TOKENS, MAX_SONG_FRAMES
from tests.triton.server import TritonServer
from tests.triton.songs import CAPTION, LYRICS, audit, grown, outcomes, sing
from tests.triton.test_input import build

SONG = {"caption": CAPTION, "lyrics": LYRICS, "max_frames": 1, "audio_encoding": "s16_base64"}
LONG_LYRICS = "la la\n" * 500
# Where Triton's HTTP door refuses a request itself, it doesn't name the field.
TRITON_NUMBER = "attempt to access JSON non-signed-integer as signed-integer"
TRITON_TEXT = "attempt to access JSON non-string as string"


def post(server: TritonServer, door: str, body: object) -> tuple[int, str]:
    """Status and text of the answer to a body, which is sent as it is if it is bytes, else as JSON."""
    connection = http.client.HTTPConnection(server.http_url.removeprefix("http://"), timeout=240)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", f"/v2/models/music3/{door}", data)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def sung(server: TritonServer, body: object) -> list[dict]:
    """The events of a song that must be one."""
    status, text = post(server, "generate_stream", body)
    assert status == 200, text
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]


def replaced(field: str, raw: bytes) -> bytes:
    """The JSON of the song with raw bytes at the beginning of a field's text."""
    body, mark = json.dumps(SONG).encode(), f'"{field}": "'.encode()
    assert body.count(mark) == 1
    return body.replace(mark, mark + raw)


def with_more(raw: bytes) -> bytes:
    """The JSON of the song with one more raw member."""
    return json.dumps(SONG).encode().removesuffix(b"}") + b", " + raw + b"}"


# --------------------------------------------------------------------------- doors other than generate_stream


def test_infer_over_http_says_that_the_model_is_decoupled(server: TritonServer) -> None:
    before = audit(server)
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [1], "data": [text]}
        for name, text in (("caption", CAPTION), ("lyrics", LYRICS))
    ]
    status, text = post(server, "infer", {"inputs": inputs})
    assert (status, "decoupled" in json.loads(text)["error"]) == (501, True)
    assert outcomes(grown(before, audit(server))) == {}


def test_a_unary_grpc_call_says_that_the_model_is_decoupled(server: TritonServer) -> None:
    before = audit(server)
    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(build({}), timeout=120)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "decoupled" in caught.value.details()
    assert outcomes(grown(before, audit(server))) == {}


def test_generate_sings_what_fits_in_one_chunk(server: TritonServer) -> None:
    status, text = post(server, "generate", SONG | {"max_frames": 30})
    assert status == 200
    answer = json.loads(text)
    (event,) = sung(server, SONG | {"max_frames": 30})
    assert answer == event
    assert (answer["progress"], answer["finish_reason"]) == ([30, 30], "length")


def test_generate_refers_a_song_of_more_chunks_to_generate_stream(
    server: TritonServer, client: Music3Client
) -> None:
    """Triton's door notices the second chunk, waits for the rest, and then says so, with status 200."""
    before = audit(server)
    status, text = post(server, "generate", SONG | {"max_frames": 210})
    assert (status, list(json.loads(text))) == (200, ["error"])
    assert "use generate stream" in json.loads(text)["error"]
    assert outcomes(grown(before, audit(server))) == {"done": 1}
    assert sing(client, max_frames=1).frames == 1


def test_generate_refuses_like_generate_stream(server: TritonServer) -> None:
    status, text = post(server, "generate", SONG | {"lyrics": " "})
    assert (status, json.loads(text)["error"].startswith("lyrics: blank")) == (400, True)


# ----------------------------------------------------------------------- what is refused by generate_stream

# What is wrong: what takes the place in the song's JSON, the status, words of the answer, and whether the
# model heard of it, or Triton's door refused it alone.
REFUSED: dict[str, tuple[object, int, str, bool]] = {
    "caption absent": ({"caption": ...}, 400, "caption: missing", True),
    "lyrics absent": ({"lyrics": ...}, 400, "lyrics: missing", True),
    "nothing at all": (b"{}", 400, "caption: missing", True),
    "lyrics blank": ({"lyrics": " \n\t"}, 400, "lyrics: blank", True),
    "caption too long": ({"caption": "é" * 20_001}, 400, "caption: 20001 characters long", True),
    "lyrics too long": ({"lyrics": "é" * 100_001}, 400, "lyrics: 100001 characters long", True),
    "lyrics of too many tokens": ({"lyrics": "la la\n" * 2000}, 400, "at most 5000", True),
    "a NUL in lyrics": ({"lyrics": "la\0"}, 400, "lyrics: has a NUL", True),
    "cap of 0": ({"max_frames": 0}, 400, "max_frames: 0 is out of range; allowed: 1 to 9000", True),
    "cap of 9001": ({"max_frames": 9001}, 400, "max_frames: 9001 is out of range", True),
    "seed of -1": ({"seed": -1}, 400, "seed: -1 is out of range", True),
    "encoding unknown": ({"audio_encoding": "mp3"}, 400, "audio_encoding: 'mp3' is unknown", True),
    "parameter unknown": ({"top_k": 5}, 400, "'top_k': this model cannot honour", True),
    "parameter unknown, text": ({"voice": "alto"}, 400, "'voice': this model cannot honour", True),
    "parameter unknown, nested": ({"parameters": {"speed": 2}}, 400, "'speed': this model cannot", True),
    "parameter a list": ({"voice": ["alto"]}, 400, "parameter 'voice' has invalid type", False),
    "caption a number": ({"caption": 1}, 500, TRITON_TEXT, False),
    "caption null": ({"caption": None}, 500, TRITON_TEXT, False),
    "lyrics true": ({"lyrics": True}, 500, TRITON_TEXT, False),
    "two captions": ({"caption": ["a", "b"]}, 400, "input 'caption' to tensor with proper shape", False),
    "cap a text": ({"max_frames": "1"}, 500, TRITON_NUMBER, False),
    "cap a fraction": ({"max_frames": 1.5}, 500, TRITON_NUMBER, False),
    "cap null": ({"max_frames": None}, 500, TRITON_NUMBER, False),
    "cap true": ({"max_frames": True}, 500, TRITON_NUMBER, False),
    "two caps": ({"max_frames": [1, 2]}, 400, "input 'max_frames' to tensor with proper shape", False),
    "cap twice": (with_more(b'"max_frames": 2'), 400, "input 'max_frames' already exists", False),
    "seed a text": ({"seed": "1"}, 500, TRITON_NUMBER, False),
    "seed of 2^63": ({"seed": 2**63}, 500, TRITON_NUMBER, False),
    "lone surrogate": (replaced("lyrics", rb"\ud800"), 500, "surrogate pair in string is invalid", False),
    "half a JSON": (b'{"caption"', 500, "failed to parse the request JSON", False),
    "no JSON": (b"", 500, "failed to parse the request JSON", False),
    "a JSON list": (b"[]", 500, "non-object", False),
    "caption of stray bytes": (replaced("caption", b"\xff"), 400, "caption: not valid UTF-8", True),
    "lyrics of a surrogate": (replaced("lyrics", b"\xed\xa0\x80"), 400, "lyrics: not valid UTF-8", True),
    "encoding cut": (replaced("audio_encoding", b"\xc3"), 400, "audio_encoding: not valid UTF-8", True),
    "parameter's text": (with_more(b'"voice": "\xff"'), 400, "parameters: not valid UTF-8", True),
    "parameter's name": (with_more(b'"vo\xffice": 1'), 400, "parameters: not valid UTF-8", True),
    "Triton's parameter": (with_more(b'"triton_x": "\xff"'), 400, "parameters: not valid UTF-8", True),
}


@pytest.mark.parametrize("what", REFUSED)
def test_over_http_it_is_refused_in_words(server: TritonServer, what: str) -> None:
    body, status, words, heard = REFUSED[what]
    if isinstance(body, dict):
        body = {name: value for name, value in (SONG | body).items() if value is not ...}
    before = audit(server)
    found, text = post(server, "generate_stream", body)
    assert found == status, text
    error = json.loads(text.removeprefix("data: "))["error"]
    assert words in error
    assert not any(trace in error for trace in ("Traceback", ".py"))
    change = grown(before, audit(server))
    assert outcomes(change) == ({"refused": 1} if heard else {})
    assert not any(name.startswith("music3_talker") for name in change)


# ---------------------------------------------------------------------------------------- what is accepted


def test_a_cap_beyond_32_bits_comes_as_another_number_over_http(server: TritonServer) -> None:
    """Triton's HTTP door keeps the low 32 bits of an INT32 input's number: 2^32 + 1 asks for one frame.

    The model is told 1 and can't know better: only what wraps to a number out of range is refused. Over gRPC
    there is no such number, as the tensor's bytes are INT32 themselves.
    """
    (event,) = sung(server, SONG | {"max_frames": 2**32 + 1})
    assert (event["progress"], event["finish_reason"]) == ([1, 1], "length")
    status, text = post(server, "generate_stream", SONG | {"max_frames": 2**32 - 1})
    assert (status, "max_frames: -1 is out of range" in text) == (400, True)


def test_an_absent_cap_is_what_the_model_and_its_context_allow(
    server: TritonServer, client: Music3Client
) -> None:
    for lyrics in (LYRICS, LONG_LYRICS):
        (event,) = sung(server, SONG | {"lyrics": lyrics})
        tokens = event["prompt_tokens"]
        most = min(MAX_SONG_FRAMES, CONTEXT_TOKENS - CONTEXT_RESERVE_TOKENS - tokens)
        assert (most < MAX_SONG_FRAMES) == (lyrics == LONG_LYRICS)
        with client.stream(CAPTION, lyrics) as song:
            chunk = next(song)
        assert (chunk.frames_done, chunk.frame_cap) == (200, most)


def test_a_song_over_http_is_that_over_grpc(server: TritonServer, client: Music3Client) -> None:
    (event,) = sung(server, SONG | {"max_frames": 20, "seed": 2**63 - 1})
    song = sing(client, max_frames=20, seed=2**63 - 1, audio_encoding="s16")
    assert event["sample_rate"] == 32_000
    np.testing.assert_array_equal(np.frombuffer(b64decode(event["audio_base64"]), "<i2"), song.audio.ravel())
