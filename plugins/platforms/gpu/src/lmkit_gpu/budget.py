"""Memory of a device that no model gets."""

from __future__ import annotations

GIB = 1 << 30


def process_bytes(total: int) -> int:
    """What a process takes of a device of `total` bytes before it holds anything of a model, estimated; 0 of nothing.

    Half a GiB for the device's context, and as much, and a fiftieth, for libraries, graphs and gaps between tensors.
    """
    return GIB + total // 50 if total else 0
