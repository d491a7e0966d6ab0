"""What the gateway adds to a song: time to the first sound, and processor time. Prints; asserts nothing.

    python -m tests.gateway.measure                        in front of a fake server, which costs nothing
    python -m tests.gateway.measure --url localhost:8001   in front of a real one (--server-pid: and its cost)

Songs are asked for in turn at the gRPC door and at the gateway: what else the machine does falls on both.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc

from client import Music3Client
from client.gateway.encoders import FORMATS
from tests.client.fake_server import FakeServer, Message, Request, read_inputs, song_messages
from tests.gateway.gateway import CAPTION, LYRICS, Gateway

DELIVERIES = [(name, {"response_format": name, "stream": True}) for name in FORMATS]
DELIVERIES += [("events", {"response_format": "pcm", "stream_format": "sse"}), ("file", {})]


class Prepared:
    """The same song for everybody, put into messages once; its first chunk takes 0.1 s."""

    def __init__(self) -> None:
        self._songs: dict[tuple[str, int], list[Message]] = {}

    def __call__(self, request: Request, context: grpc.ServicerContext) -> Iterator[Message]:
        inputs = read_inputs(request)
        key = (inputs["audio_encoding"], inputs["max_frames"])
        if key not in self._songs:
            self._songs[key] = list(song_messages(request))
        time.sleep(0.1)
        for message in self._songs[key]:
            message.infer_response.id = request.id
            yield message


def first_audio_direct_s(url: str, frames: int) -> float:
    """Request to first chunk at the gRPC door, over a connection that is there."""
    with Music3Client(url) as client:
        client.wait_until_ready(60)
        with client.stream(CAPTION, LYRICS, max_frames=frames, audio_encoding="s16") as song:
            first = next(song)
            for _ in song:
                pass
            return first.elapsed_s


def first_audio_s(gateway: Gateway, frames: int, fields: dict[str, object]) -> float:
    """Request to first byte of sound at the gateway."""
    answer = gateway.sing(max_new_tokens=frames, **fields)
    assert answer.status == 200
    # Events may begin with comments that say that the song is waited for.
    begin, received = answer.body.find(b"event: "), 0
    for arrival_s, size in answer.arrivals:
        received += size
        if received > begin:
            return arrival_s
    raise AssertionError("no sound came")


def tree_cpu_s(pid: int) -> float:
    """Processor time of a process and its children so far."""
    ticks = 0
    for folder in Path("/proc").iterdir():
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if folder.name == str(pid) or fields[1] == str(pid):
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(url: str, gateway: Gateway, *, songs: int, frames: int, server_pid: int | None) -> None:
    """One line per delivery."""
    audio_s = songs * frames / 25
    print(f"{songs} songs of {frames} frames per line; milliseconds are medians")
    print("delivery   direct ms  gateway ms  added ms  gateway's CPU per s of sound   of the server's")
    for name, fields in DELIVERIES:
        direct_s, through_s = [], []
        cpu_s = server_s = 0.0
        for _ in range(songs):
            direct_s.append(first_audio_direct_s(url, frames))
            before_s, server_before_s = gateway.cpu_s(), tree_cpu_s(server_pid) if server_pid else 0.0
            through_s.append(first_audio_s(gateway, frames, fields))
            cpu_s += gateway.cpu_s() - before_s
            server_s += tree_cpu_s(server_pid) - server_before_s if server_pid else 0.0
        direct_ms, through_ms = (1000 * statistics.median(each) for each in (direct_s, through_s))
        share = f"{100 * cpu_s / server_s:14.2f} %" if server_s else ""
        # A whole file has no sound before its end.
        added = "" if name == "file" else f"{through_ms - direct_ms:8.1f}"
        cost_ms = 1000 * cpu_s / audio_s
        print(f"{name:9} {direct_ms:10.1f} {through_ms:11.1f} {added:>9} {cost_ms:19.2f} ms {share}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", help="a running server's gRPC door; default: a fake server")
    parser.add_argument("--server-pid", type=int, help="process of that server, to compare with")
    parser.add_argument("--songs", type=int, default=20)
    parser.add_argument("--frames", type=int, default=750)
    given = parser.parse_args()
    with FakeServer(Prepared()) as fake, tempfile.TemporaryDirectory() as folder:
        url = given.url or fake.url
        with Gateway(url, log_path=Path(folder) / "gateway.log") as gateway:
            gateway.sing(max_new_tokens=given.frames)
            measure(url, gateway, songs=given.songs, frames=given.frames, server_pid=given.server_pid)


if __name__ == "__main__":
    main()
