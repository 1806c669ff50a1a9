"""Registers NVIDIA GPUs."""

from collections.abc import Iterable

from lmkit.api import PlatformSpec, Tier, hookimpl


@hookimpl
def lmkit_platforms() -> Iterable[PlatformSpec]:
    yield PlatformSpec(
        name="cuda",
        summary="NVIDIA GPUs, through torch",
        target="lmkit_platform_cuda.platform:CudaPlatform",
        probe="lmkit_platform_cuda.probe:probe",
        describe="lmkit_platform_cuda.probe:describe",
        check="lmkit_platform_cuda.check:check",
        device_type="cuda",
        tier=Tier.OPTIMIZED,
        prefers={"attention": ("flashinfer",)},
    )
