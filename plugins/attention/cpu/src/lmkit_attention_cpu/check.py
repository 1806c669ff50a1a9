"""Whether the native kernels are there. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from lmkit.api import AttentionRequest, Refusal
from lmkit_platform_cpu.native import FIX


def native(request: AttentionRequest) -> Iterator[Refusal]:
    device = request.device
    if device is not None and not device.described and "native" not in device.flags:
        yield Refusal("native", "the CPU platform's native kernels", "none were built", FIX)
