"""Linear kernels of the platform, by format, with random weights on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from lmkit.api import LinearSpec
from lmkit.plugins.host import PluginHost
from lmkit.plugins.resolve import Resolver
from lmkit_bench.kernels import random_params
from lmkit_layers.build import Builder
from lmkit_layers.linear import PLAIN
from lmkit_worker.loading.load import make_builder
from machine import Machine
from torch import Tensor

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
TOKENS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
FORMATS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {  # name -> options, keys of the checkpoint
    "plain": ({}, {}),
    "int4": ({"quantization": "int4"}, {}),
    "int8": ({"quantization": "int8"}, {}),
    "awq": ({}, {"quantization_config": AWQ}),
    "fp8": ({"quantization": "fp8"}, {}),
    "fp8 blocks": ({}, {"quantization_config": FP8}),
    # What runs only when it is named
    "plain, cutlass": ({"op": "linear_cutlass"}, {}),
    "awq, cutlass": ({"op": "int4_cutlass"}, {"quantization_config": AWQ}),
    "fp8 tokens, cutlass": ({"op": "fp8_cutlass"}, {"quantization_config": TOKENS}),
    "fp8 blocks, cutlass": ({"op": "fp8_cutlass"}, {"quantization_config": FP8}),
}
SHAPES = ((512, 384), (1024, 256))  # in, out: where values are compared
EIGHT_BITS = 6e-2  # of the largest result, where a kernel may round activations to 8 bits
TOLERANCE = 2e-2


@dataclass(frozen=True)
class Made:
    """A kernel that can run a format, and the layer that it was asked about."""

    kernel: Any
    fmt: Any
    spec: LinearSpec
    device: torch.device
    tolerance: float  # of the largest result

    def packed(self, check: bool = False) -> tuple[Any, Tensor | None]:
        """Random weights as the kernel has them; with `check`, as float64 [out, in] on the CPU as well."""
        with self.device:
            params = random_params(self.fmt, self.spec, torch.bfloat16)
        weight = None
        if check:
            weight = self.fmt.dequantize({name: value.cpu() for name, value in params.items()}, torch.float64)
        return self.kernel.pack(self.fmt, params, self.spec, torch.bfloat16), weight


@cache
def builder_of(machine: Machine, form: str) -> Builder:
    """A builder with the kernels that passed selection, preferred first. Raises what prevents a resolution."""
    options, keys = FORMATS[form]
    resolver = Resolver(machine.config(machine.folder("8b", **keys), **options), PluginHost())
    resolver.run()
    plan, known = resolver.plan(), resolver.known
    return make_builder(plan, known.checkpoint, known.info, None)


def kernels(machine: Machine, form: str, size: int, out: int) -> list[Made]:
    """Those that can run a linear of `size` inputs and `out` outputs, preferred first."""
    builder = builder_of(machine, form)
    layer = next(s for s in builder.info.linears if not s.experts and not s.parts)
    spec = replace(layer, in_features=size, out_features=(out,), bias=False)
    fmt = (builder.scheme.for_layer(spec) if builder.scheme else None) or PLAIN
    found = [k for k in builder.kernels.get(f"linear:{fmt.name}", ()) if k.can_run(fmt, spec, builder.device) is None]
    tolerance = TOLERANCE if form.startswith(("plain", "int4", "awq")) else EIGHT_BITS
    return [Made(k, fmt, spec, machine.device, tolerance) for k in found]
