"""Host values to the device without stopping it.

A copy from pageable memory makes the host wait; one from pinned memory doesn't, if nobody overwrites the
pinned block before the copy has run. torch's pinned allocator keeps track of that by itself.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[int], device: torch.device, *, dtype: torch.dtype = torch.int64) -> Tensor:
    """Integers as a tensor on the device, copied asynchronously; valid for later work on the same stream."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
