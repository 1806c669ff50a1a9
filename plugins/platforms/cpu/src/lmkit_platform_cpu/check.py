"""Whether the kernels suit the processor, and are there. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from lmkit.api import OpRequest, Refusal, SelectRequest

from lmkit_platform_cpu.native import FIX
from lmkit_platform_cpu.probe import BFLOAT16_FLAGS


def bfloat16(request: OpRequest) -> Iterator[Refusal]:
    """Without instructions for it, oneDNN emulates bfloat16 and the layout gains nothing."""
    device = request.device
    if device is not None and not device.described and not BFLOAT16_FLAGS & set(device.flags):
        yield Refusal("isa", " or ".join(sorted(BFLOAT16_FLAGS)), ", ".join(device.flags) or "none")


def native(request: SelectRequest) -> Iterator[Refusal]:
    """The library must have been built."""
    device = request.device
    if device is not None and not device.described and "native" not in device.flags:
        yield Refusal("native", "the library of native kernels", "none: there was no compiler", FIX)


def vectors(request: SelectRequest) -> Iterator[Refusal]:
    """The library, and vectors to unpack with."""
    yield from native(request)
    device = request.device
    if device is not None and not device.described and set(device.flags) & {"native", "native_avx2"} == {"native"}:
        yield Refusal("isa", "vectors that look up bytes (AVX2 or better)", "none", "--op linear_native")
