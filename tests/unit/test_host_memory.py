"""Whether the bounds bound: processes that do the same with and without them."""

import os
import subprocess
import sys

import pytest

from python_backend_models import host_memory

SHAPES = """
import torch
torch.set_num_threads(1)
convolve = torch.nn.Conv1d(64, 64, 7, padding=3)
with torch.inference_mode():
    for length in range(500, 1100):
        convolve(torch.zeros(2, 64, length))
"""
# Each thread's first allocation takes it to an arena; what is freed there stays there.
THREADS = """
import ctypes, threading
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
together = threading.Barrier(24)
def run():
    together.wait()
    blocks = [libc.malloc(60_000) for _ in range(40)]
    for block in blocks:
        ctypes.memset(block, 1, 60_000)
    together.wait()
    for block in blocks[:-1]:
        libc.free(ctypes.c_void_p(block))
threads = [threading.Thread(target=run) for _ in range(24)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
COUNT_ARENAS = """
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fopen.restype = ctypes.c_void_p
libc.fclose.argtypes = [ctypes.c_void_p]
stream = libc.fopen(b"/dev/stdout", b"w")
libc.malloc_info(0, stream)
libc.fclose(stream)
"""
RSS = """
status = open("/proc/self/status").read()
print(int(status.split("VmRSS:")[1].split()[0]))
"""
BOUND = "from python_backend_models.host_memory import bound_host_memory\nbound_host_memory()\n"


def printed(program: str, **environment: str) -> str:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in (host_memory.ONEDNN_VARIABLE, host_memory.ARENAS_VARIABLE)
    }
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, env=inherited | environment, check=True, capture_output=True, text=True
    ).stdout


def test_convolutions_of_many_lengths_keep_less() -> None:
    nothing = int(printed(BOUND + "import torch\n" + RSS))
    free, bound = int(printed(SHAPES + RSS)) - nothing, int(printed(BOUND + SHAPES + RSS)) - nothing
    assert bound < free / 2, (free, bound)


def test_threads_share_arenas() -> None:
    free, bound = (printed(before + THREADS + COUNT_ARENAS).count("<heap nr=") for before in ("", BOUND))
    assert free > 2
    assert bound == 2


def test_the_environment_goes_first() -> None:
    free = printed(BOUND + THREADS + COUNT_ARENAS, MALLOC_ARENA_MAX="5")
    assert free.count("<heap nr=") == 5


def test_an_own_limit_of_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(host_memory.ONEDNN_VARIABLE, "7")
    monkeypatch.setenv(host_memory.ARENAS_VARIABLE, "1")
    host_memory.bound_host_memory()
    assert os.environ[host_memory.ONEDNN_VARIABLE] == "7"
