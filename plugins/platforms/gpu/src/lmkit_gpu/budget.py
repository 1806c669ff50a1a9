"""Memory of a device that no model gets."""

from __future__ import annotations

GIB = 1 << 30


def headroom(total: int) -> int:
    """What stays free of a device of `total` bytes, beside weights, cache and what a step was measured to take: for
    graphs, gaps between tensors, and what libraries take later. Half a GiB and a fiftieth."""
    return GIB // 2 + total // 50


def process_bytes(total: int) -> int:
    """What a process takes of a device of `total` bytes before it holds anything of a model, estimated; 0 of nothing.

    Half a GiB for the device's context, and the headroom.
    """
    return GIB // 2 + headroom(total) if total else 0
