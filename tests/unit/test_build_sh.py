"""build.sh on machines that are made up: interpreters, package manager, GPU and server are stubs on PATH."""

import mmap
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")

# An interpreter: answers what build.sh asks of it, makes "environments" of copies of itself, logs pip.
PYTHON = """#!/bin/bash
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-m pip")
    echo "${@:3}" >>"$STUB_LOG"
    if [[ "$*" == *+cpu* && "${STUB_CPU_BUILD:-yes}" == no ]]; then echo "no such build" >&2; exit 1; fi
    if [[ "$*" == *--target* ]]; then mkdir -p .cache/reference.new; fi ;;
  -c*)
    case "$2" in
      *LIBDIR*) echo "$STUB_VERSION $STUB_LIBDIR" ;;
      *purelib*) echo "$STUB_SITE" ;;
      *version_info*) echo "$STUB_VERSION" ;;
      *"import torch"*) exit 1 ;;
      *create_server*) echo 1001 1002 1003 ;;
    esac ;;
esac
"""


class Machine:
    """A copy of the shell files in a folder of its own, on a PATH where this test decides what there is."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin, self.log = folder / "project", folder / "bin", folder / "pip.log"
        self.libdir, site = folder / "lib", folder / "site"
        for path in (self.root, self.bin, self.libdir):
            path.mkdir()
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        for name in ("build.sh", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root)
        (self.root / "model_repository").mkdir()
        (self.root / "python_backend_models").mkdir()
        for part in (
            "backends/python/libtriton_python.so",
            "python_backend_stubs/3.11/triton_python_backend_stub",
        ):
            (site / "pytriton/tritonserver" / part).parent.mkdir(parents=True)
            (site / "pytriton/tritonserver" / part).touch()
        for tool in (
            "bash",
            "env",
            "dirname",
            "sed",
            "tr",
            "head",
            "tail",
            "cat",
            "grep",
            "sort",
            "cut",
            "sha256sum",
        ):
            self._link(tool)
        for tool in (
            "flock",
            "mkdir",
            "rm",
            "mv",
            "cp",
            "touch",
            "df",
            "awk",
            "id",
            "find",
            "xargs",
            "sleep",
            "test",
        ):
            self._link(tool)
        (self.libdir / "libpython3.11.so.1.0").touch()
        self.environment = {
            "PATH": str(self.bin),
            "STUB_LOG": str(self.log),
            "STUB_VERSION": "3.11",
            "STUB_LIBDIR": str(self.libdir),
            "STUB_SITE": str(site),
        }

    def _link(self, tool: str) -> None:
        found = shutil.which(tool)
        assert found, f"this machine has no {tool}"
        (self.bin / tool).symlink_to(found)

    def stub(self, name: str, text: str) -> None:
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.root / "build.sh"), *arguments],
            cwd=self.root,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def pip(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.stub("python3.11", PYTHON)
    return made


def pinned(name: str) -> str:
    found = re.search(rf'"({re.escape(name)}==[^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert found
    return found[1]


def test_env_without_gpu_asks_for_the_cpu_build_and_a_second_run_for_nothing(machine: Machine) -> None:
    done = machine.run("env")
    assert done.returncode == 0, done.stderr
    commands = machine.pip().splitlines()
    assert any(f"{pinned('torch')}+cpu" in command for command in commands)
    assert any("--editable" in command and command.endswith("[model]") for command in commands)
    assert any("--no-deps" in command and command.endswith("pyproject.toml:server") for command in commands)
    assert (machine.root / ".server/backends/python/triton_python_backend_stub").exists()
    assert (machine.root / ".server/backends/python/libtriton_python.so").exists()
    # What it downloads is said before it is done, with sizes.
    assert re.search(r"PyTorch .*CPU build \(about \d+ MB\)", done.stderr)
    assert "nvidia-pytriton" in done.stderr
    again = machine.run("env")
    assert (again.returncode, again.stderr) == (0, "")
    assert machine.pip().splitlines() == commands


def test_env_goes_on_with_the_cuda_build_where_pip_finds_no_other(machine: Machine) -> None:
    done = machine.run("env", STUB_CPU_BUILD="no")
    assert done.returncode == 0, done.stderr
    tried = [command.split()[-1] for command in machine.pip().splitlines() if "torch==" in command]
    assert tried == [f"{pinned('torch')}+cpu", pinned("torch")]
    assert "GB" in done.stderr


def test_env_with_gpu_takes_the_cuda_build_at_once(machine: Machine) -> None:
    machine.stub("nvidia-smi", "#!/bin/bash\necho 'GPU 0: NVIDIA H200'\n")
    assert machine.run("env").returncode == 0
    assert [c.split()[-1] for c in machine.pip().splitlines() if "torch==" in c] == [pinned("torch")]


def test_env_uses_a_tritonserver_on_path(machine: Machine) -> None:
    machine.stub("tritonserver", "#!/bin/bash\n")
    machine.stub("python3", PYTHON)
    assert machine.run("env").returncode == 0
    assert ":server" not in machine.pip()
    assert not (machine.root / ".server").exists()


def test_env_is_made_anew_when_the_dependencies_change(machine: Machine) -> None:
    machine.run("env")
    before = len(machine.pip().splitlines())
    with (machine.root / "pyproject.toml").open("a") as file:
        file.write("\n# changed\n")
    assert machine.run("env").returncode == 0
    assert len(machine.pip().splitlines()) > before


@pytest.mark.parametrize("version", ["3.9", "3.13", "2.7"])
def test_other_python_versions_are_not_taken(machine: Machine, version: str) -> None:
    done = machine.run("env", STUB_VERSION=version, MUSIC3_PYTHON="python3.11")
    assert done.returncode == 1
    assert "3.10, 3.11 or 3.12" in done.stderr
    assert machine.pip() == ""


def test_tests_say_that_they_need_a_newer_python_than_the_rest(machine: Machine) -> None:
    (machine.libdir / "libpython3.10.so.1.0").touch()
    stub = (
        machine.root.parent
        / "site/pytriton/tritonserver/python_backend_stubs/3.10/triton_python_backend_stub"
    )
    stub.parent.mkdir()
    stub.touch()
    assert machine.run("env", STUB_VERSION="3.10").returncode == 0
    machine.stub("chromium", "#!/bin/bash\n")
    done = machine.run("test", STUB_VERSION="3.10")
    assert done.returncode == 1
    assert "Python 3.11 or 3.12" in done.stderr
    assert "pyproject.toml:test" not in machine.pip()


def missing_libpython(machine: Machine) -> None:
    (machine.libdir / "libpython3.11.so.1.0").unlink()
    machine.stub("ldconfig", "#!/bin/bash\n")


def test_missing_libpython_is_installed_by_root(machine: Machine) -> None:
    missing_libpython(machine)
    machine.stub("id", "#!/bin/bash\necho 0\n")
    machine.stub(
        "apt-get",
        f'#!/bin/bash\necho "apt-get $*" >>"$STUB_LOG"\ntouch {machine.libdir}/libpython3.11.so.1.0\n',
    )
    done = machine.run("env")
    assert done.returncode == 0, done.stderr
    assert machine.pip().splitlines()[0] == "apt-get install -y --no-install-recommends libpython3.11"
    assert "apt-get install" in done.stderr


@pytest.mark.parametrize(
    ("manager", "command"),
    [
        ("apt-get", "sudo apt-get install -y --no-install-recommends libpython3.11"),
        ("dnf", "sudo dnf install -y python3.11-libs"),
        (None, "libpython3.11"),
    ],
)
def test_missing_libpython_is_named_to_others(machine: Machine, manager: str | None, command: str) -> None:
    missing_libpython(machine)
    machine.stub("id", "#!/bin/bash\necho 1000\n")
    if manager:
        machine.stub(manager, '#!/bin/bash\necho "ran" >>"$STUB_LOG"\n')
    done = machine.run("env")
    assert done.returncode == 1
    assert command in done.stderr
    assert machine.pip() == ""


def test_interpreter_with_its_library_is_preferred(machine: Machine) -> None:
    """python3.11 comes first but has no shared library; python3.12 has."""
    machine.stub("python3.11", PYTHON.replace("$STUB_LIBDIR", "/nowhere"))
    machine.stub("python3.12", PYTHON.replace("$STUB_VERSION", "3.12"))
    machine.stub("ldconfig", "#!/bin/bash\n")
    (machine.libdir / "libpython3.12.so.1.0").touch()
    assert "python3.12 (Python 3.12)" in machine.run("env").stderr


SERVER = """#!/bin/bash
echo "pid $$"
echo "checkpoint $MUSIC3_CHECKPOINT"
echo "first on PATH ${PATH%%:*}"
printf '%s\\n' "$@"
"""


def test_serve_runs_the_server_in_its_place_on_localhost(machine: Machine, tmp_path: Path) -> None:
    machine.stub("tritonserver", SERVER)
    machine.stub("python3", PYTHON)
    checkpoint = tmp_path / "weights"
    checkpoint.mkdir()
    ports = ("--http-port", "11", "--grpc-port", "12", "--metrics-port", "13")
    process = subprocess.Popen(
        [
            str(machine.root / "build.sh"),
            "serve",
            *ports,
            "--checkpoint",
            "../weights",
            "--",
            "--log-verbose=1",
        ],
        cwd=machine.root,
        env=machine.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    lines = process.communicate(timeout=60)[0].splitlines()
    # The same process: a signal sent to `build.sh serve` reaches the server.
    assert lines[:3] == [
        f"pid {process.pid}",
        f"checkpoint {checkpoint}",
        f"first on PATH {machine.root}/.venv/bin",
    ]
    given = lines[3:]
    assert "--backend-config=python,thread-pool-size=32" in given
    given.remove("--backend-config=python,thread-pool-size=32")
    options = dict(zip(given[:-1:2], given[1:-1:2], strict=False))
    for door, port in (("http", "11"), ("grpc", "12"), ("metrics", "13")):
        assert options[f"--{door}-address"] == "127.0.0.1"
        assert options[f"--{door}-port"] == port
    assert options["--model-repository"] == f"{machine.root}/model_repository"
    assert given[-1] == "--log-verbose=1"


@pytest.mark.parametrize(
    ("environment", "own", "sizes"),
    [
        ({"MUSIC3_LIVE_SONGS": "8"}, [], ["32"]),
        ({"MUSIC3_LIVE_SONGS": "40"}, [], ["96"]),
        ({"MUSIC3_LIVE_SONGS": "40", "MUSIC3_MUSIC3_LIVE_SONGS": "09"}, [], ["34"]),
        ({"MUSIC3_LIVE_SONGS": "many"}, [], []),  # the load says what is wrong with it
        ({"MUSIC3_LIVE_SONGS": "40"}, ["--backend-config=python,thread-pool-size=70"], ["70"]),
    ],
)
def test_the_backend_has_threads_for_all_songs(
    machine: Machine, tmp_path: Path, environment: dict[str, str], own: list[str], sizes: list[str]
) -> None:
    """Beyond 32 threads songs would wait for each other's calls, and chunks for both."""
    machine.stub("tritonserver", SERVER)
    machine.stub("python3", PYTHON)
    (tmp_path / "weights").mkdir()
    machine.environment |= environment
    done = machine.run("serve", "--checkpoint", str(tmp_path / "weights"), "--", *own)
    assert re.findall(r"thread-pool-size=(\d+)", done.stdout) == sizes


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--checkpoint", "/no/such/folder"], {}, "/no/such/folder"),
        (["--checkpoint"], {}, "--checkpoint needs a value"),
        (["--port", "1"], {}, "unknown option --port"),
        (["--repository", "/no/such/folder"], {}, "/no/such/folder"),
        (["--checkpoint", "."], {"MUSIC3_SHM_MIN_MIB": "99999999"}, "--shm-size"),
    ],
)
def test_serve_says_what_is_wrong(
    machine: Machine, arguments: list[str], environment: Mapping[str, str], message: str
) -> None:
    machine.stub("tritonserver", SERVER)
    machine.stub("python3", PYTHON)
    done = machine.run("serve", *arguments, **environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr


@pytest.mark.parametrize(
    "then",
    [
        "exit 1",
        # A model's process that died: a child that nobody waits for, while the server goes on.
        "sleep 0.1 & exec sleep 50",
    ],
)
def test_demo_shows_the_log_of_a_server_that_does_not_start(machine: Machine, then: str) -> None:
    machine.stub(
        "tritonserver", f"#!/bin/bash\necho 'checkpoint: model.norm.weight is missing' >&2\n{then}\n"
    )
    machine.stub("python3", PYTHON)
    done = machine.run("demo", MUSIC3_CHECKPOINT=str(machine.root))
    assert done.returncode == 1
    assert "model.norm.weight is missing" in done.stderr


def test_shared_memory_that_no_process_maps_is_removed(machine: Machine) -> None:
    prefix = f"triton_python_backend_shm_region_{uuid.uuid4()}"
    left, mapped, other = (
        SHARED_MEMORY / name for name in (f"{prefix}-left", f"{prefix}-mapped", f"other-{uuid.uuid4()}")
    )
    try:
        for path in (left, mapped, other):
            path.write_bytes(bytes(4096))
        with mapped.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            machine.stub("tritonserver", SERVER)
            machine.stub("python3", PYTHON)
            done = machine.run("serve", "--checkpoint", ".")
            assert done.returncode == 0, done.stderr
            assert not left.exists()
            assert mapped.exists()
            assert other.exists()
        assert str(left) in done.stderr
        assert str(mapped) not in done.stderr
    finally:
        for path in (left, mapped, other):
            path.unlink(missing_ok=True)


def test_every_command_has_a_help_of_its_own(machine: Machine) -> None:
    listing = machine.run("--help")
    assert listing.returncode == 0
    commands = re.findall(r"^  (\S+) +\S", listing.stdout, re.MULTILINE)
    assert {"env", "serve", "demo", "client", "test", "lint"} <= set(commands)
    for command in set(commands) - {"client", "gateway"}:
        shown = machine.run(command, "--help")
        assert (shown.returncode, shown.stderr) == (0, "")
        assert len(shown.stdout.splitlines()) > 1
    assert machine.pip() == ""


def test_unknown_command_is_named(machine: Machine) -> None:
    done = machine.run("sing")
    assert done.returncode == 1
    assert "no command sing" in done.stderr


def test_no_package_index_is_named() -> None:
    """Packages come from wherever the user's pip is set up to look."""
    files = [ROOT / "build.sh", ROOT / "pyproject.toml", *sorted((ROOT / "scripts").iterdir())]
    for path in files:
        assert not re.search(r"https?://(?!127\.0\.0\.1|localhost)|--(extra-)?index-url", path.read_text()), (
            path
        )


def test_client_dependencies_are_the_plain_ones() -> None:
    """`pip install .` gives the client alone; what the models need is an extra."""
    text = (ROOT / "pyproject.toml").read_text()
    plain = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert plain
    names = set(re.findall(r'"([A-Za-z0-9_-]+)', plain[1]))
    assert names == {"numpy", "rich", "soundfile", "tritonclient"}
    assert os.access(ROOT / "build.sh", os.X_OK)
