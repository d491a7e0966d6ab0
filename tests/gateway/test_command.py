"""`./build.sh gateway` and the browser that `./build.sh test` needs, on made-up machines."""

from pathlib import Path

import pytest

from tests.unit.test_build_sh import PYTHON, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.stub("python3.11", PYTHON)
    return made


def test_gateway_installs_its_extra_once_and_runs(machine: Machine) -> None:
    machine.stub(
        "python3.11", PYTHON.replace("  -c*)", '  "-m client.gateway") echo "ran ${@:3}" ;;\n  -c*)')
    )
    done = machine.run("gateway", "--port", "9000")
    assert (done.returncode, done.stdout) == (0, "ran --port 9000\n")
    assert machine.pip().splitlines()[-1].endswith("[gateway]")
    commands = machine.pip()
    assert machine.run("gateway", "--help").stdout == "ran --help\n"
    assert machine.pip() == commands


def test_tests_install_a_browser_where_they_may(machine: Machine) -> None:
    machine.stub("id", "#!/bin/bash\necho 0\n")
    machine.stub("apt-get", '#!/bin/bash\necho "apt-get $*" >>"$STUB_LOG"\n')
    done = machine.run("test")
    assert "apt-get install -y --no-install-recommends chromium" in machine.pip().splitlines(), done.stderr


def test_tests_name_the_browser_to_others(machine: Machine) -> None:
    machine.stub("id", "#!/bin/bash\necho 1000\n")
    machine.stub("apt-get", "#!/bin/bash\n")
    done = machine.run("test")
    assert done.returncode == 1
    assert "sudo apt-get install -y --no-install-recommends chromium" in done.stderr
