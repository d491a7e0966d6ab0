"""A real gateway process for tests, on a free port, with what tests want to know of it."""

import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tests.triton.server import ROOT, wait_until

CAPTION = "Warm acoustic folk, finger-picked guitar, a soft female voice"
LYRICS = "[Verse]\nThe river learns the colour of the sky\n[Chorus]\nStay a while"


@dataclass(frozen=True)
class Answer:
    """A whole HTTP answer; `arrivals` are seconds and bytes of each piece as it came."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    arrivals: tuple[tuple[float, int], ...]

    def error(self) -> dict[str, str | None]:
        """The error in it, in the shape that OpenAI's API has."""
        found = json.loads(self.body)
        assert set(found) == {"error"}
        assert set(found["error"]) == {"message", "type", "param", "code"}
        return found["error"]

    def events(self) -> list[dict[str, object]]:
        """The events in it; each has its type as its name, too."""
        events = []
        for block in self.body.decode().split("\n\n"):
            lines = [line for line in block.split("\n") if line and not line.startswith(":")]
            if lines:
                name, data = lines
                event = json.loads(data.removeprefix("data: "))
                assert name == f"event: {event['type']}"
                events.append(event)
        return events


class Gateway:
    """One gateway process in front of `url`; `options` are its command line's."""

    def __init__(self, url: str, *options: str, log_path: Path, environment: Mapping[str, str] | None = None):
        self.log_path = log_path
        command = [sys.executable, "-m", "client.gateway", "--port", "0", "--url", url, *options]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MUSIC3_")}
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=inherited | dict(environment or {}),
            )
        try:
            wait_until(self._has_begun, timeout_s=60, what="the gateway to listen")
        except TimeoutError:
            self.stop()
            raise
        if self.process.poll() is not None:
            raise RuntimeError(f"the gateway did not start:\n{self.log()}")
        self.url = re.findall(r"listening on (\S+)/ for", self.log())[0]
        self.host, self.port = str(urlsplit(self.url).hostname), int(urlsplit(self.url).port or 0)

    def _has_begun(self) -> bool:
        return "listening on" in self.log() or self.process.poll() is not None

    def __enter__(self) -> "Gateway":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop it whatever its state."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    # ------------------------------------------------------------ asking

    def connect(self, timeout_s: float = 120.0) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)

    def ask(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        connection: http.client.HTTPConnection | None = None,
    ) -> Answer:
        """One request and its whole answer. A dict is sent as JSON, bytes as they are."""
        connection = connection or self.connect()
        raw = json.dumps(body).encode() if isinstance(body, dict) else body
        begun_s = time.monotonic()
        connection.request(method, path, body=raw, headers=dict(headers or {}))
        answer = connection.getresponse()
        pieces, arrivals = [], []
        while piece := answer.read1(2**20):
            pieces.append(piece)
            arrivals.append((time.monotonic() - begun_s, len(piece)))
        answer.read()  # nothing is left, but only this lets the connection be used again
        found = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, found, b"".join(pieces), tuple(arrivals))

    def sing(self, *, headers: Mapping[str, str] | None = None, **fields: object) -> Answer:
        """A song: POST /v1/audio/speech with these fields beside caption and lyrics."""
        body = {"input": LYRICS, "instructions": CAPTION, **fields}
        return self.ask("POST", "/v1/audio/speech", body=body, headers=headers)

    # ------------------------------------------------------------ looking

    def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics, 0 where it is not there yet. `name` is without its prefix."""
        for line in self.ask("GET", "/metrics").body.decode().splitlines():
            match = re.fullmatch(rf"(?:music3_gateway_)?{name}(?:\{{(.*)\}})? (\S+)", line)
            if match and dict(re.findall(r'(\w+)="([^"]*)"', match[1] or "")) == labels:
                return float(match[2])
        return 0.0

    def rss_bytes(self) -> int:
        """Resident memory."""
        fields = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.findall(r"VmRSS:\s+(\d+)", fields)[0])

    def cpu_s(self) -> float:
        """Processor time used so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
