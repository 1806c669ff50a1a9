"""Registers the CPU platform."""

from collections.abc import Iterable

from lmkit.api import PlatformSpec, Tier, hookimpl


@hookimpl
def lmkit_platforms() -> Iterable[PlatformSpec]:
    yield PlatformSpec(
        name="cpu",
        summary="host processors, through torch",
        target="lmkit_platform_cpu.platform:CpuPlatform",
        probe="lmkit_platform_cpu.probe:probe",
        device_type="cpu",
        fallback=True,
        tier=Tier.PORTABLE,
        stability="stable",
        prefers={"attention": ("cpu", "torch")},
    )
