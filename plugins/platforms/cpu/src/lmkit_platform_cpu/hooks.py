"""Registers the CPU platform and its linear kernel."""

from collections.abc import Iterable

from lmkit.api import OpSpec, PlatformSpec, Tier, hookimpl


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


@hookimpl
def lmkit_ops() -> Iterable[OpSpec]:
    yield OpSpec(
        name="linear_onednn",
        summary="bfloat16 linears with weights in oneDNN's own layout",
        target="lmkit_platform_cpu.linear:OneDnnLinear",
        op="linear",
        platforms=("cpu",),
        formats=frozenset({"plain"}),
        dtypes=frozenset({"bfloat16"}),
        check="lmkit_platform_cpu.check:bfloat16",
    )
