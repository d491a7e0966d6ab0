"""What the Dockerfile copies, runs and leaves out, as far as shows without a build; and its entry point."""

import fnmatch
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    text = re.sub(r"\\\n\s*", "", text)
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]  # type: ignore[misc]


def arguments(name: str) -> list[str]:
    return [argument for instruction, argument in instructions() if instruction == name]


def ignored(path: str) -> bool:
    """What .dockerignore says of a path: the last line that matches it or a folder above it decides."""
    verdict = False
    parents = [str(parent) for parent in Path(path).parents if str(parent) != "."]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!").removeprefix("**/")
        names = [path, *parents]
        if line.startswith("**/"):
            names += [Path(name).name for name in names]
        if any(fnmatch.fnmatchcase(name, pattern) for name in names):
            verdict = not line.startswith("!")
    return verdict


def test_what_is_copied_exists_and_is_in_the_context() -> None:
    sources = [part for copy in arguments("COPY") for part in shlex.split(copy)[:-1]]
    assert len(sources) == 8
    for source in sources:
        assert (ROOT / source).exists()
        assert not ignored(source), source


def test_context_holds_no_environments_caches_tests_or_songs() -> None:
    for path in (
        ".venv/bin/python",
        ".cache/tiny",
        ".server/x",
        ".git/config",
        "tests/conftest.py",
        "song.wav",
    ):
        assert ignored(path), path
    assert ignored("client/__pycache__/wire.pyc")
    assert not ignored("client/gateway/static/app.js")


def test_everything_that_serving_reads_is_copied() -> None:
    """The package list, the shell files and the repository, as build.sh and pyproject.toml name them."""
    copied = {Path(part) for copy in arguments("COPY") for part in shlex.split(copy)[:-1]}
    sourced = re.findall(r'^source "\$ROOT/(\S+)"', (ROOT / "build.sh").read_text(), re.MULTILINE)
    packages = re.search(r"find = \{ include = \[(.*?)\]", (ROOT / "pyproject.toml").read_text())
    assert packages
    needed = [*sourced, *re.findall(r'"(\w+)\*"', packages[1]), "model_repository", "pyproject.toml"]
    for name in needed:
        assert Path(name) in copied or Path(name).parents[0] in copied, name


def test_base_is_pinned_and_one_that_the_notes_do_not_warn_of() -> None:
    (release,) = arguments("ARG")
    number = release.removeprefix("TRITON_RELEASE=")
    assert re.fullmatch(r"\d\d\.\d\d", number)
    assert number >= "25.10"  # Python 3.12 and none of the releases with known defects
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    assert compose["services"]["server"]["build"]["args"]["TRITON_RELEASE"] == number
    assert f"| {number} |" in (ROOT / "docs" / "operating.md").read_text()


def test_user_is_not_root_and_comes_after_all_that_root_does() -> None:
    names = [name for name, _ in instructions()]
    assert arguments("USER") == ["1000:1000"]
    assert names.index("USER") > max(i for i, name in enumerate(names) if name in ("RUN", "COPY"))


def test_torch_is_taken_from_the_one_list() -> None:
    """The command of the Dockerfile, run on this pyproject.toml."""
    (command,) = re.findall(r'"\$\((sed .*)\)"', " ".join(arguments("RUN")))
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    pinned = re.search(r'"(torch==[^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert pinned
    assert done.stdout.split() == [pinned[1]]


# ---------------------------------------------------------------- entry point

SERVE = """#!/bin/bash
echo "serve $*" >>"$LOG"
trap 'echo "server got TERM" >>"$LOG"; exit 7' TERM
while :; do sleep 0.05; done
"""
PYTHON = """#!/bin/bash
echo "$*" >>"$LOG"
trap 'echo "drain broken off" >>"$LOG"; exit 1' TERM
for ((i = 0; i < ${DRAIN_TICKS:-4}; i++)); do sleep 0.05; done
echo drained >>"$LOG"
"""


class EntryPoint:
    """The entry point in a folder of its own with a stand-in for the server and for the drain."""

    def __init__(self, folder: Path) -> None:
        self.log, self.process = folder / "log", None
        (folder / "deploy").mkdir()
        (folder / ".venv" / "bin").mkdir(parents=True)
        for path, text in (
            (folder / "build.sh", SERVE),
            (folder / ".venv" / "bin" / "python", PYTHON),
            (folder / "deploy" / "entrypoint.sh", (ROOT / "deploy" / "entrypoint.sh").read_text()),
        ):
            path.write_text(text)
            path.chmod(0o755)
        self.path = folder / "deploy" / "entrypoint.sh"

    def start(self, *options: str, **environment: str) -> subprocess.Popen[str]:
        self.process = subprocess.Popen(
            [str(self.path), *options],
            env=os.environ | {"LOG": str(self.log)} | environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self.process

    def wait_for(self, text: str) -> None:
        deadline_s = time.monotonic() + 20
        while not self.log.exists() or text not in self.log.read_text():
            assert time.monotonic() < deadline_s, f"no {text!r}"
            time.sleep(0.01)

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def entry(tmp_path: Path) -> Iterator[EntryPoint]:
    made = EntryPoint(tmp_path)
    yield made
    if made.process and made.process.poll() is None:
        made.process.kill()
    if made.process:
        made.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_before_it_is_passed_on(entry: EntryPoint, number: signal.Signals) -> None:
    process = entry.start("--host", "0.0.0.0", MUSIC3_DRAIN_S="33")
    entry.wait_for("serve")
    process.send_signal(number)
    assert process.wait(20) == 7
    serve, drain, *rest = entry.lines()
    assert serve == "serve serve --host 0.0.0.0"
    assert re.fullmatch(r"-m python_backend_models\.control drain --pid \d+ --timeout 33", drain)
    assert rest == ["drained", "server got TERM"]


def test_a_second_signal_is_passed_on_at_once(entry: EntryPoint) -> None:
    process = entry.start(MUSIC3_DRAIN_S="600", DRAIN_TICKS="4000")
    entry.wait_for("serve")
    process.terminate()
    entry.wait_for("drain")
    process.terminate()
    assert process.wait(20) == 7
    entry.wait_for("drain broken off")
    assert "drained" not in entry.lines()


def test_without_a_drain_the_signal_is_passed_on_at_once(entry: EntryPoint) -> None:
    process = entry.start()
    entry.wait_for("serve")
    process.terminate()
    assert process.wait(20) == 7
    assert entry.lines()[1:] == ["server got TERM"]


def test_it_ends_with_the_server_and_refuses_what_is_no_number(entry: EntryPoint) -> None:
    (entry.path.parents[1] / "build.sh").write_text("#!/bin/bash\nexit 3\n")
    assert entry.start().wait(20) == 3
    process = entry.start(MUSIC3_DRAIN_S="ten")
    assert "MUSIC3_DRAIN_S is ten, not a whole number" in process.communicate(timeout=20)[1]
    assert process.returncode == 2
