"""One torch thread per test process: the suites run beside a server on few cores."""

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_report_header() -> str:
    if torch.cuda.is_available():
        return f"CUDA: {torch.cuda.get_device_name()}"
    return "CUDA: none, so tests/gpu is left out unless it is named (it fails then)"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave tests/gpu out of a run on a machine without a GPU, but not when it is asked for."""
    if collection_path != GPU_TESTS or torch.cuda.is_available():
        return None
    asked = any("gpu" in Path(argument.split("::")[0]).parts for argument in config.invocation_params.args)
    return None if asked else True
