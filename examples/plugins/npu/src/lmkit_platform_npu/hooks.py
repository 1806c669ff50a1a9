"""Registers the platform `npu`, its attention and its linears. Light: the probe runs at every start, without torch."""

import os

from lmkit.api import (
    AttentionSpec,
    BenchmarkSpec,
    ConfigProposal,
    DeviceInfo,
    DoctorCheck,
    OpSpec,
    PlatformSpec,
    Tier,
    Unavailable,
    hookimpl,
    one_of,
)

MEMORY = 2 << 30  # bytes of the device
DTYPES = ("float32", "bfloat16")


def probe():
    """Every device there is, or Unavailable with the reason. Yours asks the driver's library; this device is made up,
    and there wherever LMKIT_NPU is not 0."""
    if os.environ.get("LMKIT_NPU") == "0":
        return Unavailable("LMKIT_NPU is 0", fix="unset LMKIT_NPU")
    return [describe("", MEMORY)]


def describe(model, total_memory):
    """A device that is not here, for plans: --device npu:MODEL:16GB."""
    return DeviceInfo(
        platform="npu",
        device_type="cpu",  # as torch names it: yours once torch knows it
        name=model or "example",
        total_memory=total_memory,
        free_memory=total_memory,
        dtypes=DTYPES,
    )


def driver():
    """None, or what is wrong."""
    return None if os.environ.get("LMKIT_NPU") != "0" else "the driver is switched off: LMKIT_NPU is 0"


@hookimpl
def lmkit_platforms():
    yield PlatformSpec(
        name="npu",
        interface=1,
        summary="A made-up device with memory of its own",
        target="lmkit_platform_npu.platform:Npu",
        probe="lmkit_platform_npu.hooks:probe",
        describe="lmkit_platform_npu.hooks:describe",
        device_type="cpu",
        prefers={"attention": ("npu",), "op": ("linear_npu",)},  # kind -> names, best first, as you measured
        stability="experimental",  # named by --platform npu, never chosen by itself: it is an example
    )


@hookimpl
def lmkit_attention_backends():
    yield AttentionSpec(
        name="npu",
        interface=1,
        summary="Attention over whole pages of KV",
        target="lmkit_platform_npu.attention:NpuAttention",
        platforms=("npu",),  # elsewhere it is refused, with this as the reason
        tier=Tier.REFERENCE,
        dtypes=frozenset(DTYPES),
        block_sizes=one_of(16, 32),
        features=frozenset({"causal"}),
    )


@hookimpl
def lmkit_ops():
    yield OpSpec(
        name="linear_npu",
        interface=1,
        summary="Linears of any format, as tiles",
        target="lmkit_platform_npu.linear:NpuLinear",
        op="linear",
        platforms=("npu",),
        dtypes=frozenset(DTYPES),
        tier=Tier.REFERENCE,
    )


@hookimpl
def lmkit_configure(config, plan, info):
    """Asked once device, model and implementations are known; what the user says wins."""
    if info.num_parameters < 100_000_000:
        yield ConfigProposal("sched.max_rows", 16, "small models are done before more rows come")


@hookimpl
def lmkit_benchmarks():
    yield BenchmarkSpec(name="npu", summary="Linears as tiles", target="lmkit_platform_npu.linear:cases")


@hookimpl
def lmkit_doctor_checks():
    yield DoctorCheck(name="npu driver", summary="The driver answers", target="lmkit_platform_npu.hooks:driver")
