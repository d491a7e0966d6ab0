"""The GPU benchmark runs to its end; tried on a CPU, where its figures mean nothing."""

import json
import weakref
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_choices, report
from tests.unit.test_frame_graphs import make_runner


def test_it_runs_and_writes_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    for name, smaller in {
        "SONG_COUNTS": (1, 2),
        "POSITIONS": (20,),
        "PREFILL_TOKENS": (30,),
        "BATCHES": (1,),
        "PRECISIONS": ("float32", "bfloat16"),
        "INDEPENDENT_FRAMES": 3,
    }.items():
        monkeypatch.setattr(gpu, name, smaller)
    monkeypatch.setattr(gpu_choices, "PRECISION", "bfloat16")
    monkeypatch.setattr(gpu_choices, "BATCHES", (1,))
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module, **kw: compile_module(module, backend="aot_eager", **kw)
    )
    gpu.main(["--device", "cpu", "--size", "tiny", "--repeats", "1"])
    figures = json.loads((tmp_path / "gpu.json").read_text())
    assert {(row["graphs"], row["songs"]) for row in figures["talker"]["steps"]} == {
        (graphs, songs) for graphs in ("off", "depth", "frame") for songs in (1, 2)
    }
    # No graphs on a CPU, and the figures say so.
    assert {row["ran"] for row in figures["talker"]["steps"]} == {"off"}
    assert set(figures["talker"]["depth_loop_ms"]) == {"eager", "off"}
    assert figures["talker"]["independence"]["equal"] == 8
    assert {row["precision"] for row in figures["acoustic"]["flow"]} == {"float32", "bfloat16"}
    assert [row["what"] for row in figures["acoustic"]["choices"]] == [
        "vocoder, cuDNN by its rules",
        "vocoder, cuDNN, searched",
        "vocoder, no cuDNN",
        "vocoder, snakes compiled, cuDNN by its rules",
        "flow, compiled",
    ]
    assert torch.backends.cudnn.enabled
    assert not torch.backends.cudnn.benchmark
    assert "Frame steps" in capsys.readouterr().out


def test_the_memory_of_one_mode_is_there_for_the_next() -> None:
    """A runner holds methods of its own: nothing but the collector lets go of its page pool."""
    runner = make_runner()
    pool = weakref.ref(runner.pool)
    bench = gpu.Bench("cpu", size="tiny", budget_s=1, repeats=1)
    del runner
    gpu.release(bench)
    assert pool() is None


def test_what_the_budget_leaves_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    gpu.main(["--device", "cpu", "--size", "tiny", "--parts", "talker", "--budget-s", "0"])
    assert "left out: talker with graphs=frame" in capsys.readouterr().out
