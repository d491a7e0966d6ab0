"""The benchmarks of songs and of the acoustic stages run to their ends and account for what they measure."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import acoustic, report, song
from tests.triton.server import TritonServer


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (report, acoustic, song):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    return tmp_path


def test_songs(results: Path, tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    song.main(["--checkpoint", str(tiny_checkpoint), "--clients", "1", "3", "--frames", "12", "--no-alone"])
    figures = json.loads((results / "song.json").read_text())
    assert [each["clients"] for each in figures["levels"]] == [1, 3]
    for each in figures["levels"]:
        listeners, windows = each["listeners"], each["windows"]
        # 12 frames are one window: 41 latents, 20,992 samples at 44.1 kHz, 15,233 at 32 kHz.
        assert listeners["audio_s"] == pytest.approx(each["clients"] * 15_233 / 32_000)
        assert windows["dit"]["windows"] == windows["vocoder"]["windows"] == each["clients"]
        assert 0 < windows["dit"]["computes"] <= windows["dit"]["asked to answered"]
        assert all(0 < each["share_of_wall"][stage] < 1 for stage in song.STAGES)
    assert "Listeners" in capsys.readouterr().out
    assert (results / "song.png").stat().st_size > 0


def test_one_song_s_parts_are_its_whole(server: TritonServer) -> None:
    # One window, so that the talker can't write ahead here either.
    alone = song.overhead(server, frames=12)
    whole, share = alone.pop("song"), alone.pop("overhead")
    assert sum(alone.values()) == pytest.approx(whole)
    engines = sum(alone[f"{stage} computes"] for stage in song.STAGES)
    assert share == pytest.approx(whole / engines - 1)
    # What is left over when the stages' own times are taken off can't be less than nothing.
    assert all(seconds >= 0 for seconds in alone.values())


def test_acoustic_stages(
    results: Path,
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    smaller = {"SONGS_TOGETHER": 2, "BATCHES": (1, 2), "LENGTHS_FRAMES": (5, 9), "GROWTH_STEPS": 1}
    for name, value in smaller.items():
        monkeypatch.setattr(acoustic, name, value)
    threads = str(torch.get_num_threads())
    acoustic.main(
        ["--checkpoint", str(tiny_checkpoint), "--steps", "2", "--rounds", "1", "--threads", threads]
    )
    figures = json.loads((results / "acoustic.json").read_text())
    assert [row["windows"] for row in figures["comparison"]] == [1, 2, 1, 1]
    assert all(row["largest difference"] < 1e-4 for row in figures["comparison"])
    assert [row["latents"] for row in figures["by_length"]] == [17, 31]
    assert all(0 < row["share"] < 3 for row in figures["shares"])
    assert len(figures["savings"]) == 6
    assert "Share of the rate" in capsys.readouterr().out
    assert (results / "acoustic.png").stat().st_size > 0


def test_sides_that_differ_are_not_compared() -> None:
    sides = {name: lambda: [torch.ones(2)] for name in ("this engine", "vllm-omni")}
    sides["diffusers"] = lambda: [torch.ones(2) + 0.01]
    with pytest.raises(RuntimeError, match=r"differ by 1\.0e-02"):
        acoustic.compare(sides, rounds=1, clock=lambda: 0.0)
