"""Registers the CPU platform and its linear kernels."""

from collections.abc import Iterable
from dataclasses import dataclass

from lmkit.api import BenchmarkSpec, DoctorCheck, OpSpec, PlatformSpec, Tier, hookimpl


@dataclass(frozen=True, slots=True)
class Options:
    """Options of platform.cpu."""

    isa: str = "auto"  # instruction set of the native kernels: portable, avx2, avx512, avx512_vnni, avx512_bf16, amx


@hookimpl
def lmkit_platforms() -> Iterable[PlatformSpec]:
    yield PlatformSpec(
        name="cpu",
        summary="host processors, with native kernels where they are built",
        options="lmkit_platform_cpu.hooks:Options",
        target="lmkit_platform_cpu.platform:CpuPlatform",
        probe="lmkit_platform_cpu.probe:probe",
        device_type="cpu",
        fallback=True,
        tier=Tier.PORTABLE,
        stability="stable",
        prefers={
            "attention": ("cpu", "torch"),
            "op": ("linear_compact", "linear_native", "linear_integer_native", "linear_onednn"),
        },
    )


@hookimpl
def lmkit_ops() -> Iterable[OpSpec]:
    yield OpSpec(
        name="linear_compact",
        summary="as linear_native, with bfloat16 weights in 12 bits and not a bit lost: less to read, the same results",
        target="lmkit_platform_cpu.packed:CompactLinear",
        op="linear",
        platforms=("cpu",),
        formats=frozenset({"plain"}),
        dtypes=frozenset({"bfloat16"}),
        bits={"plain": 12.1},
        check="lmkit_platform_cpu.check:vectors",
    )
    yield OpSpec(
        name="linear_native",
        summary="linears over weights packed once, in native kernels: as fast as memory is read",
        target="lmkit_platform_cpu.packed:NativeLinear",
        op="linear",
        platforms=("cpu",),
        formats=frozenset({"plain"}),
        check="lmkit_platform_cpu.check:native",
    )
    yield OpSpec(
        name="linear_integer_native",
        summary="linears over weights of 8 or 4 bits, in native integer arithmetic",
        target="lmkit_platform_cpu.integer:IntegerLinear",
        op="linear",
        platforms=("cpu",),
        formats=frozenset({"int8", "w8a8", "int4", "mxfp4", "nvfp4", "nf4", "fp4"}),
        bits={"nf4": 4.25, "fp4": 4.25},
        check="lmkit_platform_cpu.check:native",
    )
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
    yield OpSpec(
        name="moe_native",
        summary="mixtures of experts over packed weights of any of these formats, in one native operator",
        target="lmkit_platform_cpu.experts:NativeExperts",
        op="moe",
        platforms=("cpu",),
        formats=frozenset({"plain", "int8", "w8a8", "int4", "mxfp4", "nvfp4", "nf4", "fp4"}),
        check="lmkit_platform_cpu.check:native",
    )
    yield OpSpec(
        name="rowwise_native",
        summary="norms, activations, rotary positions and embedding by native kernels",
        target="lmkit_platform_cpu.rowops:NativeRowOps",
        op="rowwise",
        platforms=("cpu",),
        check="lmkit_platform_cpu.check:native",
    )
    yield OpSpec(
        name="recurrent_native",
        summary="scans, delta rules and convolutions of recurrent layers by native kernels",
        target="lmkit_platform_cpu.recurrent:NativeRecurrentOps",
        op="recurrent",
        platforms=("cpu",),
        check="lmkit_platform_cpu.check:native",
    )


@hookimpl
def lmkit_benchmarks() -> Iterable[BenchmarkSpec]:
    yield BenchmarkSpec(
        name="limits",
        summary="what memory and registers of this machine can do",
        target="lmkit_platform_cpu.benchmarks:cases",
    )


@hookimpl
def lmkit_doctor_checks() -> Iterable[DoctorCheck]:
    yield DoctorCheck(
        name="native",
        summary="The native kernels are built",
        target="lmkit_platform_cpu.native:doctor",
        level="warning",
    )
