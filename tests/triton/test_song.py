"""Songs through the real server against the same songs made offline."""

import base64
import json
import re
import shutil
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch

from client import Chunk, InvalidRequest, Music3Client
from python_backend_models import offline
from python_backend_models.tiny_checkpoint import write_tiny_checkpoint
from tests.triton.conftest import MakeServer
from tests.triton.server import ROOT, TritonServer
from tests.triton.songs import CAPTION, LYRICS, OfflineSongs, audit, cancelled_since, grown, sing, together

LONGEST = 301


@pytest.fixture(scope="module")
def songs(tiny_checkpoint: Path) -> OfflineSongs:
    return OfflineSongs(tiny_checkpoint)


# Frames -> samples at 32 kHz: what vllm-omni 0.30.0 makes of its windows.
SAMPLES = {
    1: 1115,
    99: 126_689,
    100: 127_803,
    101: 128_918,
    199: 254_491,
    200: 255_977,
    201: 257_092,
    250: 319_879,
    300: 384_151,
    301: 385_266,
}


@pytest.mark.parametrize("frames", [250, LONGEST])
def test_streamed_chunks_are_the_offline_song(client: Music3Client, songs: OfflineSongs, frames: int) -> None:
    expected = songs.audio(frames=frames, of=LONGEST)
    chunks = list(client.stream(CAPTION, LYRICS, max_frames=frames))
    np.testing.assert_array_equal(np.concatenate([chunk.audio for chunk in chunks]), expected)
    assert [chunk.frames_done for chunk in chunks] == [200, *range(300, frames, 100), frames]
    assert {chunk.frame_cap for chunk in chunks} == {frames}
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"


def test_16_bit_songs_over_grpc_and_http_are_the_float_song_rounded(
    server: TritonServer, client: Music3Client, songs: OfflineSongs
) -> None:
    exact = songs.audio(frames=250, of=LONGEST).astype(np.float64)
    expected = np.clip(np.floor(exact * 32768), -32768, 32767).astype("<i2")
    song = sing(client, max_frames=250, audio_encoding="s16")
    np.testing.assert_array_equal(song.audio, expected)
    events = generate_stream(server, max_frames=250)
    sound = b"".join(base64.b64decode(event["audio_base64"]) for event in events)
    np.testing.assert_array_equal(np.frombuffer(sound, "<i2").reshape(-1, 2), expected)
    assert [event["progress"] for event in events] == [[200, 250], [250, 250]]
    assert events[-1]["finish_reason"] == "length"


def generate_stream(server: TritonServer, **fields: object) -> list[dict]:
    """The JSON events of a song over HTTP."""
    body = {"caption": CAPTION, "lyrics": LYRICS, "audio_encoding": "s16_base64"} | fields
    request = urllib.request.Request(
        server.http_url + "/v2/models/music3/generate_stream", json.dumps(body).encode()
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        lines = answer.read().decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


def test_sound_leaves_while_the_song_is_being_written(server: TritonServer, client: Music3Client) -> None:
    before = audit(server)
    with client.stream(CAPTION, LYRICS, max_frames=9000) as song:
        chunk: Chunk = next(song)
    assert (chunk.frames_done, chunk.finish_reason) == (200, None)
    change = cancelled_since(server, before, songs=1)
    # The window that was sent, the one asked for next, one ahead of it, and what was drawn until the cancel,
    # which may be late where the machine is busy.
    assert 200 <= change["music3_talker_frames_total"] <= 3000


def test_songs_of_different_length_started_together_equal_their_solo_runs(
    server: TritonServer, client: Music3Client, songs: OfflineSongs
) -> None:
    caps = {11: 20, 12: 110, 13: 210, 14: 301}
    before = audit(server)
    made = together(
        [lambda seed=seed, cap=cap: sing(client, seed=seed, max_frames=cap) for seed, cap in caps.items()]
    )
    for (seed, cap), song in zip(caps.items(), made, strict=True):
        assert (song.frames, song.finish_reason) == (cap, "length")
        np.testing.assert_allclose(song.audio, songs.audio(seed=seed, frames=cap), rtol=0, atol=1e-4)
    # They did run together: far fewer steps than frames.
    change = grown(before, audit(server))
    assert change["music3_talker_frames_total"] >= sum(caps.values())
    assert change["music3_talker_steps_total"] < 0.8 * sum(caps.values())


def test_every_length_has_its_exact_number_of_samples(client: Music3Client, songs: OfflineSongs) -> None:
    lengths = sorted(SAMPLES)
    made = together([lambda frames=frames: sing(client, max_frames=frames) for frames in lengths])
    for frames, song in zip(lengths, made, strict=True):
        assert (song.frames, song.finish_reason) == (frames, "length")
        assert song.audio.shape == (SAMPLES[frames], 2)
        expected = songs.audio(frames=frames, of=LONGEST)
        np.testing.assert_allclose(song.audio, expected, rtol=0, atol=1e-4)


def test_forty_short_songs_at_once_all_come_back(
    server: TritonServer, client: Music3Client, songs: OfflineSongs
) -> None:
    made = together([lambda seed=seed: sing(client, seed=seed % 4, max_frames=6) for seed in range(40)])
    for seed, song in enumerate(made):
        expected = songs.audio(seed=seed % 4, frames=6)
        np.testing.assert_allclose(song.audio, expected, rtol=0, atol=1e-4)


def test_twenty_songs_in_a_row_are_the_same_bytes(client: Music3Client) -> None:
    first = sing(client, seed=3, max_frames=5).audio
    assert np.abs(first).max() > 1e-3
    for _ in range(19):
        np.testing.assert_array_equal(sing(client, seed=3, max_frames=5).audio, first)


def test_a_bad_request_costs_nothing_and_the_next_song_is_fine(
    server: TritonServer, client: Music3Client, songs: OfflineSongs
) -> None:
    before = audit(server)
    with pytest.raises(InvalidRequest, match="lyrics: blank"):
        sing(client, lyrics=" \n ")
    np.testing.assert_array_equal(sing(client, max_frames=6).audio, songs.audio(frames=6, of=LONGEST))
    change = grown(before, audit(server))
    assert (change["music3_songs_total refused"], change["music3_songs_total done"]) == (1, 1)


def test_a_tag_line_with_words_warns_and_sings_like_the_reference(client: Music3Client) -> None:
    song = sing(client, lyrics="[Verse] these words are lost\nthese are not", max_frames=3)
    (warning,) = song.warnings
    assert "line 1" in warning
    bare = sing(client, lyrics="[Verse]\nthese are not", max_frames=3)
    assert bare.warnings == ()
    np.testing.assert_array_equal(song.audio, bare.audio)


def test_the_other_profile_sings_like_its_own_offline_songs(make_server: MakeServer, tmp_path: Path) -> None:
    """Lead-in frame, draw seed and 16-bit rounding of sglang-omni, in songs that stop and one that is cut."""
    profile = "sglang-omni"
    checkpoint = write_tiny_checkpoint(tmp_path / "stopping", stop_logit=10.0)
    models = offline.load_models(checkpoint, profile=profile)
    running = make_server(checkpoint=checkpoint, environment={"MUSIC3_PROFILE": profile})
    ends = []
    with Music3Client(running.grpc_url) as client:
        for seed, cap in ((0, 60), (1, 60), (2, 5)):
            with torch.inference_mode():
                expected = offline.make_song(
                    models, CAPTION, LYRICS, seed=seed, max_frames=cap, profile=profile
                )
            exact = expected.audio.numpy()
            song = sing(client, seed=seed, max_frames=cap)
            assert (song.frames, song.finish_reason) == (len(expected.codes), expected.finish_reason)
            np.testing.assert_array_equal(song.audio, exact)
            ends.append(song.finish_reason)
            rounded = sing(client, seed=seed, max_frames=cap, audio_encoding="s16").audio
            np.testing.assert_array_equal(rounded, np.trunc(np.clip(exact, -1, 1) * np.float32(32767)))
            assert (rounded != np.floor(exact * 32768).clip(-32768, 32767)).any()
    assert ends == ["stop", "stop", "length"]
    audit(running)


def test_songs_that_stop_by_themselves(make_server: MakeServer, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "stopping", stop_logit=10.0)
    songs = OfflineSongs(checkpoint)
    running = make_server(checkpoint=checkpoint)
    with Music3Client(running.grpc_url) as client:
        made = together([lambda seed=seed: sing(client, seed=seed, max_frames=120) for seed in range(5)])
        ends = [songs.finish(seed=seed, frames=120) for seed in range(5)]
        assert [(song.frames, song.finish_reason) for song in made] == ends
        assert "stop" in {reason for _, reason in ends}
        assert len({frames for frames, _ in ends}) > 1
        for seed, song in enumerate(made):
            expected = songs.audio(seed=seed, frames=120)
            np.testing.assert_allclose(song.audio, expected, rtol=0, atol=1e-4)
    audit(running)


@pytest.mark.parametrize("reopen_after_s", ["0", "7"])
def test_a_song_goes_on_where_the_server_has_closed_its_idle_sequence(
    make_server: MakeServer, songs: OfflineSongs, tmp_path: Path, reopen_after_s: str
) -> None:
    """Triton closes a sequence after 20 ms without a request here, which is in every window of a song."""
    repository = tmp_path / "repository"
    shutil.copytree(ROOT / "model_repository", repository)
    config = repository / "talker" / "config.pbtxt"
    text = config.read_text()
    short = re.sub(r"(max_sequence_idle_microseconds): \d+", r"\1: 20000", text)
    assert short != text
    config.write_text(short)
    running = make_server(
        repository=repository,
        arguments=["--log-verbose=1"],
        environment={"MUSIC3_REOPEN_AFTER_S": reopen_after_s},
    )
    with Music3Client(running.grpc_url) as client:
        np.testing.assert_array_equal(
            sing(client, max_frames=LONGEST).audio, songs.audio(frames=LONGEST, of=LONGEST)
        )
        waiting = [client.stream(CAPTION, LYRICS, seed=seed, max_frames=2000) for seed in range(4)]
        for song in waiting:
            next(song)
        for song in waiting:
            song.cancel()
        audit(running)
    assert "force-ending CORRID" in running.log_text()
