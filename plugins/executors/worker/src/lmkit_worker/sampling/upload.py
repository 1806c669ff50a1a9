"""Arrays of the host for kernels of the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNED = 16  # bytes: what a kernel loads at once


def uploaded(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays on the device, all of them in one copy from pinned memory. Does not wait, and keeps no array."""
    starts = np.cumsum([0, *(-(-a.nbytes // ALIGNED) * ALIGNED for a in arrays)]).tolist()
    host = torch.empty(starts[-1], dtype=torch.uint8)
    packed = host.numpy()
    for a, start in zip(arrays, starts, strict=False):
        packed[start : start + a.nbytes] = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
    there = host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
    return [
        there[start : start + a.nbytes].view(getattr(torch, a.dtype.name)).view(a.shape)
        for a, start in zip(arrays, starts, strict=False)
    ]
