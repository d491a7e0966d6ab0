"""Real songs: a real tritonserver with a small random model, a real gateway, and the clients people have."""

import io
import json
import re
import shutil
import subprocess
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest

from client import Music3Client, Song
from client.gateway.encoders import FORMATS
from python_backend_models.prompt import PromptBuilder
from tests.gateway.gateway import CAPTION, LYRICS, Gateway
from tests.gateway.test_request import DOCUMENTED
from tests.triton.server import TritonServer, wait_until

FRAMES, SEED = 50, 11
FIELDS = {"seed": SEED, "max_new_tokens": FRAMES}


@pytest.fixture(scope="module")
def song(server: TritonServer) -> Song:
    """The song as the client library gets it, past the gateway."""
    with Music3Client(server.grpc_url) as client:
        return client.generate(CAPTION, LYRICS, seed=SEED, max_frames=FRAMES, audio_encoding="s16")


@pytest.fixture
def openai_client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="EMPTY", max_retries=0) as client:
        yield client


def samples_of(wav: bytes) -> np.ndarray:
    """`[samples, 2]` int16 of a WAV file, as Python's own reader understands its header."""
    with wave.open(io.BytesIO(wav)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (32_000, 2, 2)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, 2)


def test_a_file_is_the_song(gateway: Gateway, song: Song, tiny_checkpoint: Path) -> None:
    answer = gateway.sing(**FIELDS)
    np.testing.assert_array_equal(samples_of(answer.body), song.audio)
    prompt = PromptBuilder(tiny_checkpoint / "tokenizer" / "tokenizer.json").build(CAPTION, LYRICS)
    assert answer.headers["x-music3-prompt-tokens"] == str(len(prompt.ids))
    assert answer.headers["x-music3-frames"] == str(song.frames)
    assert answer.headers["x-music3-finish-reason"] == song.finish_reason
    assert answer.headers["x-music3-seed"] == str(SEED)


def test_sound_comes_while_the_song_is_being_written(gateway: Gateway, server: TritonServer) -> None:
    with Music3Client(server.grpc_url) as client:
        song = client.generate(CAPTION, LYRICS, seed=SEED, max_frames=210, audio_encoding="s16")
    answer = gateway.sing(seed=SEED, max_new_tokens=210, stream=True)
    np.testing.assert_array_equal(np.frombuffer(answer.body[44:], "<i2").reshape(-1, 2), song.audio)
    # One so long that neither the gateway's buffer holds it nor the server is soon done with it.
    connection = gateway.connect()
    fields = {"input": LYRICS, "instructions": CAPTION, "seed": SEED, "max_new_tokens": 9000, "stream": True}
    connection.request("POST", "/v1/audio/speech", body=json.dumps(fields))
    long = connection.getresponse()
    assert len(long.read(64 * 1024)) == 64 * 1024
    name = long.headers["X-Request-Id"]
    assert f"song {name}: done" not in server.log_text()
    wait_until(
        lambda: gateway.metric("live_songs") == 1, timeout_s=10, what="the song alone to be on its way"
    )
    connection.close()
    long.close()
    wait_until(
        lambda: f"song {name}: cancelled" in server.log_text(),
        timeout_s=60,
        what="the server to give the song up",
    )


def test_a_reader_that_leaves_frees_its_place(gateway: Gateway, server: TritonServer, song: Song) -> None:
    connection = gateway.connect()
    fields = {"input": LYRICS, "instructions": CAPTION, "max_new_tokens": 9000, "stream": True}
    connection.request("POST", "/v1/audio/speech", body=json.dumps(fields))
    answer = connection.getresponse()
    assert answer.read(1000)
    connection.close()
    answer.close()
    line = f"song {answer.headers['X-Request-Id']}: cancelled"
    wait_until(lambda: line in server.log_text(), timeout_s=60, what="the server to give the song up")
    assert gateway.sing(**FIELDS, response_format="pcm").body == song.audio.tobytes()


# ---------------------------------------------------------------- clients


def test_openai_client_streams_to_a_file(openai_client: openai.OpenAI, song: Song, tmp_path: Path) -> None:
    path = tmp_path / "song.wav"
    with openai_client.audio.speech.with_streaming_response.create(
        model="MiniMaxAI/MiniMax-Music3",
        voice="default",
        input=LYRICS,
        instructions=CAPTION,
        response_format="wav",
        extra_body={**FIELDS, "stream": True},
    ) as answer:
        answer.stream_to_file(path)
    np.testing.assert_array_equal(np.frombuffer(path.read_bytes()[44:], "<i2").reshape(-1, 2), song.audio)


def test_openai_client_gets_files_models_and_errors(openai_client: openai.OpenAI, song: Song) -> None:
    ask = {"model": "MiniMaxAI/MiniMax-Music3", "voice": "default", "input": LYRICS, "instructions": CAPTION}
    whole = openai_client.audio.speech.create(**ask, extra_body=FIELDS)
    np.testing.assert_array_equal(samples_of(whole.content), song.audio)
    assert [model.id for model in openai_client.models.list()] == ["MiniMaxAI/MiniMax-Music3", "music3"]
    for wrong, param in (({"voice": "alloy"}, "voice"), ({"speed": 2.0}, "speed")):
        with pytest.raises(openai.BadRequestError) as raised:
            openai_client.audio.speech.create(**{**ask, **wrong})
        assert raised.value.param == param
    # What only the model can judge comes from it, in this door's words.
    for extra, param in (({"seed": -1}, "seed"), ({"max_new_tokens": 9001}, "max_new_tokens")):
        with pytest.raises(openai.BadRequestError) as raised:
            openai_client.audio.speech.create(**ask, extra_body=extra)
        assert raised.value.param == param
        assert "max_frames" not in str(raised.value)
    with pytest.raises(openai.BadRequestError) as raised:
        openai_client.audio.speech.create(**{**ask, "instructions": "---"})
    assert raised.value.param == "instructions"
    with pytest.raises(openai.NotFoundError):
        openai_client.audio.speech.create(**{**ask, "model": "tts-1"})


@pytest.mark.parametrize("name", DOCUMENTED)
def test_curl_with_the_peers_documented_requests(gateway: Gateway, tmp_path: Path, name: str) -> None:
    """As their pages say it, but for the length, which is cut to a second for the test's sake."""
    assert shutil.which("curl"), "this machine has no curl"
    body, shortened = re.subn(r'"max_new_tokens": \d+', '"max_new_tokens": 25', DOCUMENTED[name])
    assert shortened == 1
    path = tmp_path / "song.wav"
    command = ["curl", "-sS", "--fail-with-body", "-X", "POST", f"{gateway.url}/v1/audio/speech"]
    command += ["-H", "Content-Type: application/json", "-d", body, "--output", str(path)]
    subprocess.run(command, check=True, timeout=120)
    # 25 frames are 86 latents of 512 samples at 44.1 kHz: 86 x 512 x 320 / 441 = 31,951.4 samples at 32 kHz.
    assert len(samples_of(path.read_bytes())) in (31_951, 31_952)


def test_events_of_a_real_song(gateway: Gateway, song: Song) -> None:
    lyrics = LYRICS.replace("[Chorus]\n", "[Chorus] ")
    first, *_, done = gateway.sing(**FIELDS | {"input": lyrics}, stream_format="sse").events()
    assert len(first["warnings"]) == 1
    assert "line 3" in str(first["warnings"])
    assert done["frames"] == FRAMES
    assert done["usage"]["input_tokens"] > 0
    assert done["usage"]["total_tokens"] == done["usage"]["input_tokens"] + FRAMES


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.slow])
def test_other_formats_hold_the_song(gateway: Gateway, song: Song, name: str) -> None:
    import soundfile

    heard, rate_hz = soundfile.read(io.BytesIO(gateway.sing(**FIELDS, response_format=name).body))
    assert (rate_hz, heard.shape) == (32_000, song.audio.shape)
    loudest = np.abs(song.audio / 32768).max()
    assert np.abs(heard - song.audio / 32768).max() < (1 / 32768 if name == "flac" else max(loudest, 0.01))
