"""Faults inside the real server: values that aren't finite, failed allocations, processes that are killed."""

import math
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from client import Music3Client, Music3Error, ServerError, ServerUnavailable, Song
from client.probe import probe
from python_backend_models.chunking import window_latents
from python_backend_models.engine import acoustic, faults, talker
from python_backend_models.engine.acoustic import FlowEngine, FlowWindow, VocoderEngine
from tests.acoustic_models import make_acoustic
from tests.triton.conftest import MakeServer
from tests.triton.server import TritonServer, is_alive, wait_until
from tests.triton.songs import CAPTION, LYRICS, OfflineSongs, audit, metrics, note_threads, sing, together
from tests.unit.test_talker import collect, make_engine, plan

FRAMES = 12
MOST_ROUNDS = 12
# Nothing here takes long; a song without an answer by then has none.
ANSWER_WITHIN_S = 60.0

# A failed batch is computed again item by item, so a range of two calls ends exactly one song, and a single
# failed call none. Numbers are calls: two prefills and 12 steps a song, seven depth logits a step.
FAULTS = {
    "MUSIC3_TALKER_FAULT": "oom_prefill@8,oom_step@90,nan_backbone_logits@6,inf_depth_logits@260",
    "MUSIC3_DIT_FAULT": "nan_latents@3,oom_solve@7-8,oom_solve@13",
    "MUSIC3_VOCODER_FAULT": "inf_waveform@5,oom_decode@9-10,oom_decode@14",
}
NOT_FINITE = "talker: frame has a value that is not finite"
OOM_STEP = "talker: the talker failed on this song"
EXPECTED = {
    NOT_FINITE: 2,
    "talker: the talker failed on this song's prompt": 1,
    "dit: the solve is not finite": 1,
    "dit: not enough memory": 1,
    "vocoder: the sound is not finite": 1,
    "vocoder: not enough memory": 1,
}


@pytest.fixture(scope="module")
def songs(tiny_checkpoint: Path) -> OfflineSongs:
    return OfflineSongs(tiny_checkpoint)


@dataclass
class Played:
    """What came of rounds of three songs at once, each round followed by one song alone."""

    rounds: list[list[Song | Music3Error]] = field(default_factory=list)
    alone: list[Song | Music3Error] = field(default_factory=list)

    @property
    def errors(self) -> list[Music3Error]:
        everything = [*self.alone, *(song for each in self.rounds for song in each)]
        return [song for song in everything if isinstance(song, Music3Error)]

    @property
    def told(self) -> Counter[str]:
        """Messages without the frame's number."""
        return Counter(re.sub(r"frame \d+ ", "frame ", error.message) for error in self.errors)


@pytest.fixture(scope="module")
def played(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    """A server with every fault in wait, played until all have happened."""
    found = Played()
    with TritonServer(
        checkpoint=tiny_checkpoint,
        log_path=tmp_path_factory.mktemp("faulty") / "server.log",
        environment={"MUSIC3_TEST_FAULTS": "1"} | FAULTS,
    ) as server:
        with Music3Client(server.grpc_url) as client:
            while len(found.rounds) < MOST_ROUNDS:
                tasks = [song_of(client, seed) for seed in range(3)]
                found.rounds.append(together(tasks))
                if not server.threads_at_rest:
                    note_threads(server)
                audit(server)
                found.alone += together([song_of(client, 3)])
                audit(server)
                if {*EXPECTED, OOM_STEP} <= found.told.keys() and found.told[NOT_FINITE] >= 2:
                    break
            # All faults are behind: the same server goes on as if nothing had been.
            found.rounds.append(together([song_of(client, seed) for seed in range(3)]))
        assert probe(server.grpc_url, timeout_s=ANSWER_WITHIN_S) >= 0
        audit(server)
        yield found


def song_of(client: Music3Client, seed: int) -> Callable[[], Song]:
    return lambda: sing(client, seed=seed, max_frames=FRAMES, deadline_s=ANSWER_WITHIN_S)


@pytest.mark.parametrize("message", EXPECTED)
def test_a_fault_ends_one_song(played: Played, message: str) -> None:
    assert played.told[message] == EXPECTED[message]


def test_a_failed_step_ends_the_songs_that_were_in_it(played: Played) -> None:
    assert 1 <= played.told[OOM_STEP] <= 3


def test_faults_are_internal_errors_without_paths_or_tracebacks(played: Played) -> None:
    assert played.told.keys() == {*EXPECTED, OOM_STEP}
    for error in played.errors:
        assert type(error) is ServerError
        assert not re.search(r"/|\.py|Traceback|\n", error.message)


def test_neighbours_and_later_songs_of_a_broken_one_equal_the_offline_songs(
    played: Played, songs: OfflineSongs
) -> None:
    whole = 0
    for made in [*played.rounds, *([None, None, None, song] for song in played.alone)]:
        for seed, song in enumerate(made):
            if isinstance(song, Song):
                expected = songs.audio(seed=seed, frames=FRAMES)
                np.testing.assert_allclose(song.audio, expected, rtol=0, atol=1e-4)
                whole += 1
    assert whole == 4 * len(played.rounds) - 1 - len(played.errors)
    assert any(
        {type(song) for song in made} == {Song, ServerError} for made in played.rounds
    )  # some did have a neighbour that failed
    assert all(isinstance(song, Song) for song in played.rounds[-1])


# ------------------------------------------------- every place with every value that isn't finite, unserved

VALUES = {"nan": math.nan, "inf": math.inf, "minus inf": -math.inf}


def spoil(owner: object, method: str, value: float) -> None:
    """Have a network's first result hold this value once."""
    setattr(owner, method, faults._at_calls(range(1, 2), getattr(owner, method), faults._spoiled(value)))


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("network", ["backbone", "depth"])
def test_logits_that_are_not_finite_end_their_song_alone(network: str, value: str) -> None:
    engine = make_engine()
    spoil(getattr(engine.runner, network), "logits", VALUES[value])
    for key in (1, 2):
        engine.admit(key, plan(key, max_frames=20))
    made = collect(engine, [1, 2])
    broken = [song for song in made.values() if isinstance(song, talker.NonFiniteError)]
    assert len(broken) == 1
    engine.admit(3, plan(3, max_frames=2))
    assert isinstance(collect(engine, [3])[3], list)


@pytest.mark.parametrize("value", VALUES)
def test_latents_and_sound_that_are_not_finite_are_no_result(value: str) -> None:
    made = make_acoustic(seed=3)
    flow = FlowEngine(made.encoder, made.transformer, device="cpu", steps=2)
    vocoder = VocoderEngine(made.vocoder, device="cpu")
    width = made.encoder.layers * made.encoder.config["condition_hidden_dim"]
    window = FlowWindow(torch.zeros(4, width), 0, 0, None)
    latent = torch.zeros(made.vocoder.config["latent_channels"], window_latents(4))
    for engine, method, compute in (
        (flow, "_integrate", lambda: flow.solve([window])),
        (vocoder, "_forward", lambda: vocoder.decode([latent], [(0, 0)])),
    ):
        spoil(engine, method, VALUES[value])
        assert isinstance(compute()[0], acoustic.NonFiniteError)
        assert not isinstance(compute()[0], Exception)


# -------------------------------------------------------------------- killed processes


def kill_stub(server: TritonServer, model: str) -> None:
    (pid,) = server.stub_pids(model)
    os.kill(pid, signal.SIGKILL)


def is_red(server: TritonServer) -> bool:
    try:
        probe(server.grpc_url, timeout_s=ANSWER_WITHIN_S)
    except Music3Error:
        return True
    return False


def test_songs_of_a_killed_stage_get_an_error_and_a_new_start_recovers(
    make_server: MakeServer, songs: OfflineSongs
) -> None:
    """One server loses its stages from the last to the first: each is missed by those before it."""
    server = make_server(options=["--stay"])
    with Music3Client(server.grpc_url) as client:
        with client.stream(CAPTION, LYRICS, max_frames=2000, deadline_s=2 * ANSWER_WITHIN_S) as song:
            assert next(song).frames_done == 200
            kill_stub(server, "vocoder")
            with pytest.raises(ServerUnavailable, match=r"^vocoder: .* songs run and \d+ wait"):
                list(song)
        assert is_red(server)
        dead = ["vocoder"]
        audit(server, dead=dead)
        for model in ("dit", "talker"):
            running = [
                client.stream(CAPTION, LYRICS, seed=seed, max_frames=2000, deadline_s=2 * ANSWER_WITHIN_S)
                for seed in range(3)
            ]
            # All three are with the talker, or, the first ones, already with dit.
            frames = metrics(server)["music3_talker_frames_total"]
            wait_until(
                lambda frames=frames: metrics(server)["music3_talker_frames_total"] > frames,
                timeout_s=ANSWER_WITHIN_S,
                what="frames",
            )
            kill_stub(server, model)
            dead.append(model)
            for song in running:
                # A first window that was through before the kill meets what had died before.
                with pytest.raises(
                    ServerUnavailable, match=rf"^({'|'.join(dead)}): .* songs run and \d+ wait"
                ):
                    list(song)
            results = together([song_of(client, seed) for seed in range(3)])
            for error in results:
                assert type(error) is ServerUnavailable, error
                assert error.message.startswith(f"{model}: ")
            assert is_red(server)
            wait_until(
                lambda: metrics(server)["music3_live_songs"] == 0,
                timeout_s=ANSWER_WITHIN_S,
                what="the line to be empty",
            )
        assert server.running  # as it was asked to stay
    server.kill()  # told to stop, it would wait half a minute for the dead
    server.start()
    with Music3Client(server.grpc_url) as client:
        np.testing.assert_array_equal(song_of(client, 0)().audio, songs.audio(seed=0, frames=FRAMES))
    audit(server)


def test_a_server_without_its_front_door_ends_and_comes_back_whole(
    make_server: MakeServer, songs: OfflineSongs
) -> None:
    server = make_server()
    with Music3Client(server.grpc_url) as client:
        with client.stream(CAPTION, LYRICS, max_frames=2000, deadline_s=2 * ANSWER_WITHIN_S) as song:
            assert next(song).frames_done == 200
            stubs = server.stub_pids()
            kill_stub(server, "music3")
            with pytest.raises(Music3Error):
                list(song)
        assert is_red(server)
    wait_until(lambda: not server.running, timeout_s=ANSWER_WITHIN_S, what="the server to end")
    # By the guard; now and then Triton 2.51 aborts by itself, when the stub dies amid a message to it.
    log = server.log_text()
    assert "the process of music3 died" in log or "Signal (6) received" in log
    wait_until(
        lambda: not any(map(is_alive, stubs)), timeout_s=ANSWER_WITHIN_S, what="the other stubs to be ended"
    )
    server.start()
    with Music3Client(server.grpc_url) as client:
        np.testing.assert_array_equal(song_of(client, 0)().audio, songs.audio(seed=0, frames=FRAMES))
    audit(server)
