"""Every command in the fenced blocks of README.md and docs/ is run here, or listed with why it can't be.

They run as they stand but for addresses: the server and the gateway that the pages start listen on free
ports, and /path/to/checkpoint is a small random checkpoint whose songs end by themselves after some seconds.
"""

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import soundfile

from python_backend_models.tiny_checkpoint import write_tiny_checkpoint
from tests.docs.commands import ROOT, Block, all_blocks, blocks, pages, shell_commands
from tests.ports import free_ports

NO_DOCKER = "needs a container runtime, images and a GPU; tests/deploy checks the file"
NO_CLUSTER = "needs Helm and a cluster; tests/deploy renders and lints the chart with Helm's engine"
# What can't run here, and why. An entry that no page has any more fails a test.
ELSEWHERE = {
    "./build.sh demo": "continuous integration runs it right after the tests",
    "./build.sh test": "it is what runs this",
    "MUSIC3_CHECKPOINT=/path/to/checkpoint ./build.sh demo": "needs the official weights; else as the demo",
    "./build.sh checkpoint /path/to/checkpoint": "needs the official weights; "
    "tests/unit/test_checkpoint_report.py has a stand-in",
    "MUSIC3_CHECKPOINT=/path/to/checkpoint docker compose -f deploy/compose.yaml up --build --detach": (
        NO_DOCKER
    ),
    "docker compose -f deploy/compose.yaml logs --follow server": NO_DOCKER,
    "helm lint deploy/helm/music3": NO_CLUSTER,
    "helm install songs deploy/helm/music3 --set checkpoint.claim=music3-weights": NO_CLUSTER,
    "kubectl rollout status deployment/songs-music3": NO_CLUSTER,
}
SERVE = "./build.sh serve --checkpoint /path/to/checkpoint"
GATEWAY = "./build.sh gateway"
# Languages of blocks that hold no commands; a block without a language is output or a piece of a file.
NO_COMMANDS = {"", "html"}
START_WITHIN_S = 300.0


def unique(language: str) -> list[str]:
    """Texts of the blocks of a language, in order; for bash its commands."""
    found: dict[str, None] = {}
    for block in all_blocks():
        if block.language == language:
            found |= dict.fromkeys(shell_commands(block.text) if language == "bash" else [block.text])
    return list(found)


COMMANDS = [command for command in unique("bash") if command not in {*ELSEWHERE, SERVE, GATEWAY}]


@dataclass(frozen=True)
class Place:
    """A folder where the commands run as they stand, with what they use in it, and addresses filled in."""

    folder: Path
    checkpoint: Path
    addresses: Mapping[str, str]
    environment: Mapping[str, str]

    def fill(self, text: str) -> str:
        for address, actual in self.addresses.items():
            text = text.replace(address, actual)
        return text.replace("/path/to/checkpoint", str(self.checkpoint))

    def start(self, command: str, log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            return subprocess.Popen(
                ["bash", "-c", f"exec env {command}"],
                cwd=self.folder,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_WITHIN_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline_s:
            process.kill()
            pytest.fail(f"it did not start:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(0.1)


def stop(process: subprocess.Popen[bytes]) -> int:
    process.terminate()
    try:
        return process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def with_ports(command: str, ports: list[int]) -> str:
    """A serve command that listens on these ports."""
    http, grpc, metrics = ports
    options = f"serve --http-port {http} --grpc-port {grpc} --metrics-port {metrics}"
    return command.replace("./build.sh serve", f"./build.sh {options}")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A server and a gateway, started by the pages' commands, and a folder with what others need."""
    folder = tmp_path_factory.mktemp("newcomer")
    checkpoint = write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", stop_logit=8)
    programs = folder / "programs"
    programs.mkdir()
    for path, text in (
        (folder / "build.sh", f'exec {ROOT}/build.sh "$@"'),
        (
            programs / "perf_analyzer",
            f'LD_LIBRARY_PATH={ROOT}/.cache/perf/lib exec {ROOT}/.cache/perf/bin/perf_analyzer "$@"',
        ),
    ):
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    (folder / "client").symlink_to(ROOT / "client")
    (folder / "lyrics.txt").write_text("[Verse]\nThe river learns the colour of the sky\n")
    songs = [{"name": name, "caption": "folk", "lyrics": "[Verse]\nla"} for name in ("one", "two")]
    (folder / "songs.jsonl").write_text("".join(json.dumps(song) + "\n" for song in songs))

    ports, (gateway_port,) = free_ports(3), free_ports(1)
    http, grpc, metrics = ports
    own = {name: value for name, value in os.environ.items() if not name.startswith("MUSIC3_")}
    environment = own | {
        "MUSIC3_URL": f"localhost:{grpc}",
        "PATH": f"{programs}:{ROOT}/.venv/bin:{os.environ['PATH']}",
    }
    addresses = {
        "localhost:8000": f"localhost:{http}",
        "localhost:8001": f"localhost:{grpc}",
        "localhost:8002": f"localhost:{metrics}",
        "localhost:8080": f"localhost:{gateway_port}",
        "./build.sh loadtest": f"./build.sh loadtest --out {folder}/loadtest",
    }
    made = Place(folder, checkpoint, addresses, environment)
    server = made.start(with_ports(made.fill(SERVE), ports), folder / "server.log")
    wait_for(lambda: answers(f"http://localhost:{http}/v2/health/ready"), server, folder / "server.log")
    # Other servers may run on this machine; a person who has one need not name it.
    addresses["./build.sh drain"] = f"./build.sh drain --pid {server.pid}"
    gateway_command = f"{GATEWAY} --port {gateway_port} --url localhost:{grpc}"
    gateway = made.start(gateway_command, folder / "gateway.log")
    try:
        url = f"http://localhost:{gateway_port}/health"
        wait_for(lambda: answers(url), gateway, folder / "gateway.log")
        yield made
    finally:
        codes = stop(gateway), stop(server)
    # The gateway's web server ends itself by the signal that it was sent, once it has tidied up.
    assert codes == (-signal.SIGTERM, 0), "the gateway or the server did not end well"


def test_every_page_is_read() -> None:
    assert {block.page for block in all_blocks()} >= {
        "README.md",
        "docs/gateway.md",
        "docs/operating.md",
        "docs/scaling.md",
    }
    assert {block.language for block in all_blocks()} == {"bash", "python", *NO_COMMANDS}


def test_list_of_what_cannot_run_is_exact() -> None:
    commands = set(unique("bash"))
    assert commands >= {*ELSEWHERE, SERVE, GATEWAY}
    # Nothing that a person could run here is on it by its program alone.
    here = {command for command in ELSEWHERE if command.split()[0] == "./build.sh"}
    assert here == {
        "./build.sh demo",
        "./build.sh test",
        "./build.sh checkpoint /path/to/checkpoint",
    }


@pytest.mark.parametrize("command", [each for each in COMMANDS if "./build.sh serve" not in each])
def test_command(command: str, place: Place) -> None:
    done = subprocess.run(
        ["bash", "-c", place.fill(command)],
        cwd=place.folder,
        env=dict(place.environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout or done.stderr or re.search(" --(output|undo)", command)
    assert '"error"' not in done.stdout
    for name in re.findall(r"--(?:out|output) (\S+\.\w+)", command):
        taken = sorted(place.folder.glob(f"{Path(name).stem}*{Path(name).suffix}"))
        assert len(taken) >= (4 if "--seed 1-4" in command else 1)
        assert all(soundfile.info(path).samplerate == 32_000 for path in taken)


@pytest.mark.parametrize("command", [each for each in COMMANDS if "./build.sh serve" in each])
def test_command_that_serves(command: str, place: Place) -> None:
    ports = free_ports(3)
    log = place.folder / "other.log"
    process = place.start(with_ports(place.fill(command), ports), log)
    wait_for(lambda: answers(f"http://localhost:{ports[0]}/v2/health/ready"), process, log)
    assert stop(process) == 0


@pytest.mark.parametrize("text", unique("python"))
def test_python(text: str, place: Place) -> None:
    done = subprocess.run(
        [str(ROOT / ".venv" / "bin" / "python"), "-c", place.fill(text)],
        cwd=place.folder,
        env=dict(place.environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr


def test_links_lead_somewhere() -> None:
    for page in pages():
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert re.match(r"https?://", target) or (page.parent / target).exists(), (page.name, target)


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b   # why\nc\n", ["a b", "c"]),
        ("# only words\n\na --url x#y\n", ["a --url x#y"]),
        ("a \\\n  --b 1 \\\n  -c\n", ["a --b 1 -c"]),
        ("curl -d '{\n  \"x\": 1}'\nb\n", ["curl -d '{\n  \"x\": 1}'", "b"]),
    ],
)
def test_commands_are_read_as_a_shell_reads_them(text: str, expected: list[str]) -> None:
    assert shell_commands(text) == expected
    assert blocks(f"before\n```bash\n{text}```\nafter\n", page="p") == [Block("p", "bash", text)]


def test_a_command_that_does_not_end_is_an_error() -> None:
    with pytest.raises(ValueError, match="ends within a command"):
        shell_commands("echo 'open\n")
