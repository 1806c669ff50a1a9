"""Calls compiled kernels as `launch.multiply` does, on a machine without a driver: all up to the launch itself.

Prints what stopped each. Run with CUTE_DSL_ARCH set to the architecture, in a process of its own.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from lmkit_op_cutlass import launch

ARCH = os.environ["CUTE_DSL_ARCH"]
major, minor = int(ARCH[3:-2]), int(ARCH[-2])
torch.cuda.get_device_properties = lambda device: SimpleNamespace(major=major, minor=minor, multi_processor_count=132)
torch.cuda.current_stream = lambda device: SimpleNamespace(cuda_stream=0)


def call(what: str, kind: torch.dtype, weight: torch.Tensor, **how: Any) -> None:
    x, out = torch.zeros(5, 128).to(kind), torch.zeros(5, 192).bfloat16()
    for bias in (None, torch.zeros(192).bfloat16()):
        try:
            launch.multiply(x, weight, out, bias, **how)
            print(what, "ran")
        except Exception as e:
            print(what, "cudaErrorInsufficientDriver" if "cudaErrorInsufficientDriver" in str(e) else repr(e))


call("plain", torch.bfloat16, torch.zeros(192, 128).bfloat16())
fp8, both = torch.float8_e4m3fn, (torch.ones(1, 192), torch.ones(1, 5))
call("rows", fp8, torch.zeros(192, 128).to(fp8), scales="rows", factors=both)
if ARCH == "sm_90a":
    call("blocks", fp8, torch.zeros(192, 128).to(fp8), scales="blocks", factors=both)
    codes, factors = torch.zeros(4, 2, 128, 4, dtype=torch.int32), torch.zeros(1, 256, dtype=torch.int32)
    call("codes", torch.bfloat16, codes, factors=(factors,), group=128)
