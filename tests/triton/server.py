"""A real tritonserver for tests, started the way a person starts it: `./build.sh serve` on free ports.

Beside starting and stopping it, this reads what a test wants to hold constant: its log, its stubs, memory,
threads, open files and shared-memory regions.
"""

import contextlib
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.ports import free_ports

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")
_REGION = re.compile(r"/dev/shm/(triton_python_backend_shm_region_\S+)")
_STARTS = 3


class TritonServer:
    """One server process with its stubs, as a context manager.

    `checkpoint` is served from `repository` (this project's by default); `environment` is added to this
    process's, less its MUSIC3_ settings; `options` go to `build.sh serve`, `arguments` to tritonserver. The
    log is `log_path`.
    """

    def __init__(
        self,
        *,
        checkpoint: Path,
        log_path: Path,
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        options: Sequence[str] = (),
        repository: Path | None = None,
        ready_timeout_s: float = 180.0,
    ) -> None:
        self.log_path = log_path
        self._checkpoint, self._repository = checkpoint, repository
        self._environment, self._arguments = dict(environment or {}), list(arguments)
        self._options = list(options)
        self._ready_timeout_s = ready_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._http_port = self._grpc_port = self._metrics_port = 0
        self.threads_at_rest: dict[str, float] = {}  # by model, kept here for who audits this server

    # ------------------------------------------------------------ addresses

    @property
    def http_url(self) -> str:
        """http://host:port, without a path."""
        return f"http://127.0.0.1:{self._http_port}"

    @property
    def grpc_url(self) -> str:
        """host:port, as gRPC clients take it."""
        return f"127.0.0.1:{self._grpc_port}"

    @property
    def metrics_url(self) -> str:
        """The Prometheus page."""
        return f"http://127.0.0.1:{self._metrics_port}/metrics"

    # ------------------------------------------------------------ start and stop

    def start(self) -> "TritonServer":
        """Start it and wait until it is ready. Raises RuntimeError with the end of its log."""
        for _ in range(_STARTS):
            self._launch()
            if self._wait_until_ready():
                return self
            # Another process may have taken a port between choosing it and binding it.
            if "already in use" not in self.log_text().lower():
                break
        raise RuntimeError(f"the server did not become ready; the end of its log:\n{self.log_tail()}")

    def _launch(self) -> None:
        self._http_port, self._grpc_port, self._metrics_port = free_ports(3)
        command = [str(ROOT / "build.sh"), "serve", "--checkpoint", str(self._checkpoint)]
        command += ["--http-port", str(self._http_port), "--grpc-port", str(self._grpc_port)]
        command += ["--metrics-port", str(self._metrics_port), *self._options]
        if self._repository is not None:
            command += ["--repository", str(self._repository)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MUSIC3_")}
        self.threads_at_rest = {}
        # Tests compare what the page says before and after: it should not take them long to know.
        environment |= {"MUSIC3_METRICS_INTERVAL_S": "0.1"} | self._environment
        # Appended to, as the server and its stubs all write to it and a stub may outlive the server.
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--", *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def _wait_until_ready(self) -> bool:
        deadline_s = time.monotonic() + self._ready_timeout_s
        all_alive_s = time.monotonic()
        # Triton 2.51 waits for ever for a model whose process died while loading: a zombie tells.
        while time.monotonic() < deadline_s and time.monotonic() < all_alive_s + 3.0 and self.running:
            if self.is_ready() and self._has_metrics_page():
                return True
            if all(is_alive(pid) for pid in _children(self.pid)):
                all_alive_s = time.monotonic()
            time.sleep(0.1)
        self.kill()
        return False

    def _has_metrics_page(self) -> bool:
        # Triton opens this port last, some 40 ms after the one that tells of readiness.
        try:
            return "music3_" in self.metrics()
        except (urllib.error.URLError, OSError):
            return False

    def terminate(self, timeout_s: float = 60.0) -> int:
        """SIGTERM, as a container's runtime sends it; the exit code. Raises TimeoutError when it stays."""
        process = self._started()
        process.terminate()
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            tail = self.log_tail()
            self.kill()
            raise TimeoutError(f"still running {timeout_s} s after SIGTERM; its log ends:\n{tail}") from None

    def kill(self) -> None:
        """SIGKILL the server and its stubs, and wait until all are gone."""
        process = self._started()
        stubs = self.stub_pids()
        process.kill()
        process.wait()
        for pid in stubs:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(
            lambda: not any(is_alive(pid) for pid in stubs), timeout_s=10.0, what="the stubs to be gone"
        )

    def stop(self) -> None:
        """Stop it whatever its state; for the end of a test."""
        if self._process is None:
            return
        if self.running:
            with contextlib.suppress(TimeoutError):
                self.terminate(timeout_s=10.0)
        if self.running:
            self.kill()

    def __enter__(self) -> "TritonServer":
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    # ------------------------------------------------------------ what it is doing

    @property
    def running(self) -> bool:
        """Whether the server process is there."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The server's process id; the stubs are its children."""
        return self._started().pid

    def is_ready(self, model: str | None = None) -> bool:
        """What the server says of its readiness, or of one model's."""
        path = "/v2/health/ready" if model is None else f"/v2/models/{model}/ready"
        try:
            with urllib.request.urlopen(self.http_url + path, timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def metrics(self) -> str:
        """The metrics page."""
        with urllib.request.urlopen(self.metrics_url, timeout=10) as answer:
            return answer.read().decode()

    def log_text(self) -> str:
        """Everything logged so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self, lines: int = 60) -> str:
        """The end of the log."""
        return "\n".join(self.log_text().splitlines()[-lines:])

    def stub_pids(self, model: str | None = None) -> list[int]:
        """The Python stub processes, of one model or of all."""
        pids = []
        for pid in _children(self.pid):
            arguments = _command_line(pid)
            if not arguments or not arguments[0].endswith("triton_python_backend_stub"):
                continue
            if model is None or f"/{model}/" in arguments[1]:
                pids.append(pid)
        return sorted(pids)

    def pids(self) -> list[int]:
        """The server and all its stubs."""
        return [self.pid, *self.stub_pids()]

    def rss_bytes(self) -> dict[int, int]:
        """Resident memory by process id, shared memory not counted."""
        found = {}
        for pid in self.pids():
            status = Path(f"/proc/{pid}/status").read_text()
            found[pid] = sum(1024 * _status_number(status, field) for field in ("RssAnon", "RssFile"))
        return found

    def threads(self) -> dict[int, int]:
        """Threads by process id."""
        return {pid: _entries(f"/proc/{pid}/task") for pid in self.pids()}

    def open_files(self) -> dict[int, int]:
        """Open file descriptors by process id."""
        return {pid: _entries(f"/proc/{pid}/fd") for pid in self.pids()}

    def shared_memory_bytes(self) -> dict[str, int]:
        """Bytes in use by region of /dev/shm that the server has mapped."""
        regions = set(_REGION.findall(Path(f"/proc/{self.pid}/maps").read_text()))
        return {name: 512 * (SHARED_MEMORY / name).stat().st_blocks for name in sorted(regions)}

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process


def wait_until(condition: Callable[[], bool], *, timeout_s: float, what: str, poll_s: float = 0.05) -> None:
    """Wait until `condition()` is true. Raises TimeoutError naming `what`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited {timeout_s} s for {what}")
        time.sleep(poll_s)


def _entries(folder: str) -> int:
    return sum(1 for _ in Path(folder).iterdir())


def _children(pid: int) -> list[int]:
    children = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if _status_number((folder / "status").read_text(), "PPid") == pid:
                    children.append(int(folder.name))
    return children


def _command_line(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
    return []


def _status_number(status: str, field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+)", status, re.MULTILINE)
    return int(match[1]) if match else 0


def is_alive(pid: int) -> bool:
    """Whether there is such a process, other than one that nobody has waited for yet."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return "State:\tZ" not in status
