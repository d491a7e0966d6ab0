"""The container's entry point over the real server: a stop in the middle of a song lets the song end."""

import asyncio
import os
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from client import AsyncMusic3Client, InvalidRequest, Music3Client, Music3Error
from client.probe import probe
from tests.ports import free_ports
from tests.triton.conftest import MakeServer
from tests.triton.server import ROOT, wait_until

OUTLIVES = 1500  # frames: not done before the drain has begun and a song was refused


def test_a_stop_lets_the_song_end_and_takes_no_new_one(tiny_checkpoint: Path, tmp_path: Path) -> None:
    http, grpc, metrics = free_ports(3)
    command = [str(ROOT / "deploy" / "entrypoint.sh"), "--http-port", str(http), "--grpc-port", str(grpc)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MUSIC3_")}
    environment |= {"MUSIC3_CHECKPOINT": str(tiny_checkpoint), "MUSIC3_DRAIN_S": "500"}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--metrics-port", str(metrics)], stdout=log, stderr=subprocess.STDOUT, env=environment
        )

    def ready() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{http}/v2/health/ready", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    try:
        wait_until(ready, timeout_s=180, what="the server to be ready")
        client = Music3Client(f"127.0.0.1:{grpc}")
        with client, client.stream("folk", "[Verse]\nla", max_frames=OUTLIVES) as song:
            chunks = [next(song)]
            process.send_signal(signal.SIGTERM)
            refusal = refused(client)
            chunks += list(song)
        assert "draining" in str(refusal)
        assert chunks[-1].finish_reason == "length"
        assert chunks[-1].frames_done == OUTLIVES
        assert process.wait(60) == 0
    except BaseException:
        print((tmp_path / "log").read_text(errors="replace")[-6000:])
        raise
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def refused(client: Music3Client) -> Music3Error:
    """What a new song is told once the drain has begun."""
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        try:
            client.generate("folk", "[Verse]\nla", max_frames=1)
        except Music3Error as error:
            return error
    return pytest.fail("new songs are still taken")


@pytest.mark.parametrize("kind", ["song", "probe", "refusal", "asynchronous refusal"])
def test_streams_that_were_read_to_the_end_let_the_server_end(make_server: MakeServer, kind: str) -> None:
    """A client that drops a stream at its final response keeps the request, and so the model, from going."""
    server = make_server()

    async def refused() -> None:
        async with AsyncMusic3Client(server.grpc_url) as client:
            for _ in range(200):
                with pytest.raises(InvalidRequest):
                    await client.generate("folk", " ")

    with Music3Client(server.grpc_url) as client:
        match kind:
            case "song":
                for seed in range(40):
                    client.generate("folk", "[Verse]\nla", seed=seed, max_frames=1)
            case "probe":
                for _ in range(40):
                    probe(server.grpc_url)
            case "refusal":
                for _ in range(200):
                    with pytest.raises(InvalidRequest):
                        client.generate("folk", " ")
            case _:
                asyncio.run(refused())
    assert server.terminate(timeout_s=25) == 0
