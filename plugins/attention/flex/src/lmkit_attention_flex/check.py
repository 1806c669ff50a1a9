"""On which devices FlexAttention runs. Light: the resolver asks, and the backend when it is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from lmkit.api import AttentionRequest, Refusal

CAPABILITY = (8, 0)


def check(request: AttentionRequest) -> Iterator[Refusal]:
    """GPUs from compute capability 8.0 on, and CPUs, which have none."""
    device = request.device
    if device is not None and device.device_type != "cpu" and (device.capability or (0, 0)) < CAPABILITY:
        has = ".".join(map(str, device.capability or ())) or "a device without one"
        yield Refusal("capability", "compute capability 8.0 of a GPU", has)
