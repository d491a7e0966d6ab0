"""These tests need a CUDA device, and say so where there is none."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _cuda() -> None:
    if not torch.cuda.is_available():
        pytest.fail("tests/gpu needs a CUDA device, and torch finds none")
