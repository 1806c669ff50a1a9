"""A kernel for GPUs: float8 times float8 in one operator of torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lmkit.api import DeviceInfo, LinearKernel, LinearSpec, PackedWeight, QuantFormat
from lmkit_layouts import Fp8Format, Rounding
from torch import Tensor

CAPABILITY = (8, 9)  # the first NVIDIA GPUs that multiply float8
MULTIPLE = 16  # of rows and columns of a weight, which cuBLAS and CUTLASS read 16 bytes at a time


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """weight [out, in] float8, scales [1, out] float32; activations become float8 as `inputs` says."""

    weight: Tensor
    scales: Tensor
    inputs: Rounding
    input_scale: float = 1.0

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scales.nbytes


class Fp8ScaledMM(LinearKernel):
    """`torch._scaled_mm` with a scale for each row of x and of the weight; scales of whole tensors are repeated."""

    name = "fp8_scaled_mm"

    def can_run(self, fmt: QuantFormat, layer: LinearSpec, device: DeviceInfo) -> str | None:
        if device.capability is None or device.capability < CAPABILITY:
            offered = "none" if device.capability is None else ".".join(map(str, device.capability))
            return f"float8 products need compute capability 8.9, the device has {offered}"
        if not isinstance(fmt, Fp8Format) or fmt.inputs is None:
            return "multiplies float8 by float8; activations of this format stay as they are"
        if fmt.block is not None or fmt.inputs.kind == "group":
            return "has a scale for each row, and none for blocks of columns"
        if layer.total_out % MULTIPLE or layer.in_features % MULTIPLE:
            return f"needs multiples of {MULTIPLE} rows and columns, not {layer.total_out} x {layer.in_features}"
        return None

    def pack(self, fmt: QuantFormat, params: dict[str, Tensor], layer: LinearSpec, dtype: torch.dtype) -> ScaledWeight:
        assert isinstance(fmt, Fp8Format)
        assert fmt.inputs is not None
        found = fmt.floats(params, rounds=True)
        params.clear()
        return ScaledWeight(found.codes, found.scales.reshape(1, -1), fmt.inputs, found.input_scale)

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        assert isinstance(weight, ScaledWeight)
        codes, scales = weight.inputs.codes(x.reshape(-1, x.shape[-1]), weight.input_scale)
        rows = scales.expand(len(codes), 1).contiguous()
        out = torch._scaled_mm(codes, weight.weight.t(), rows, weight.scales, bias, out_dtype=x.dtype)
        return out.view(*x.shape[:-1], -1)
