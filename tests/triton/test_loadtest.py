"""The load test with the real perf_analyzer on the real server: that it runs and is understood, not speed."""

import json
import subprocess
from pathlib import Path

from tests.triton.server import ROOT, TritonServer

SAMPLES_OF_30_FRAMES = 38_267  # 103 latents of 512 samples at 44.1 kHz, at 32 kHz, rounded up


def test_load_test_writes_its_report(server: TritonServer, tmp_path: Path) -> None:
    options = ["--url", server.grpc_url, "--concurrency", "1,2", "--songs-per-client", "1"]
    options += ["--seconds", "1.2", "--warm-up", "0", "--out", str(tmp_path)]
    command = [str(ROOT / "build.sh"), "loadtest", *options]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"-u {server.grpc_url} -i grpc --async --streaming" in done.stderr
    levels = json.loads((tmp_path / "loadtest.json").read_text())["levels"]
    assert [(level["concurrency"], level["songs"]) for level in levels] == [(1, 1), (2, 2)]
    for level in levels:
        for trace in level["traces"]:
            assert [round(seconds * 32_000) for seconds in trace["audio_s"]] == [SAMPLES_OF_30_FRAMES]
            assert trace["arrivals_s"][0] > 0
        assert level["audio_s"] / level["wall_s"] == level["audio_per_second"]
    assert (tmp_path / "loadtest.png").stat().st_size > 10_000
    assert "<svg" in (tmp_path / "loadtest.html").read_text()
    assert done.stdout.startswith("| clients |")
