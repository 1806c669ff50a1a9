"""Registers AMD GPUs."""

from collections.abc import Iterable

from lmkit.api import PlatformSpec, Tier, hookimpl


@hookimpl
def lmkit_platforms() -> Iterable[PlatformSpec]:
    yield PlatformSpec(
        name="rocm",
        summary="AMD GPUs, through torch built for ROCm",
        target="lmkit_platform_rocm.platform:RocmPlatform",
        probe="lmkit_platform_rocm.probe:probe",
        describe="lmkit_platform_rocm.probe:describe",
        check="lmkit_platform_rocm.check:check",
        device_type="cuda",  # torch's name for them
        tier=Tier.OPTIMIZED,
    )
