"""Linears by the kernels of this package. Activations become float8 only where the format says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from lmkit.api import DeviceInfo, IntegerFormat, LinearKernel, LinearSpec, PackedWeight, QuantFormat
from lmkit_layouts import Fp8Format, OffsetRows, Rounding
from torch import Tensor

from lmkit_op_cutlass.codes import PIECE, factors, fragments
from lmkit_op_cutlass.tiles import ALIGNED

BLOCK = 128  # columns of a scale of float8
HOPPER, BLACKWELL = (9, 0), (10, 0)


def elsewhere(device: DeviceInfo, *made_for: tuple[int, int]) -> str | None:
    """Why a kernel for these compute capabilities does not run on `device`."""
    if device.capability in made_for:
        return None
    wanted, offered = (
        [".".join(map(str, each)) for each in found if each] for found in (made_for, [device.capability])
    )
    return f"made for compute capability {' and '.join(wanted)}, the device has {''.join(offered) or 'none'}"


def uneven(layer: LinearSpec, columns: int) -> str | None:
    """Why columns do not fit, of which the kernel takes multiples of `columns`."""
    if layer.in_features % columns == 0:
        return None
    return f"needs a multiple of {columns} columns, {layer.name} has {layer.in_features}"


def whole(layer: LinearSpec, columns: int) -> None:
    """Raises ValueError where a rank's share is not what `can_run` was asked about."""
    if reason := uneven(layer, columns):
        raise ValueError(reason)


def placed(x: Tensor) -> Tensor:
    """[..., k] -> [rows, k] without gaps, where TMA can copy from."""
    x = x.reshape(-1, x.shape[-1]).contiguous()
    return x if x.data_ptr() % ALIGNED == 0 else x.clone()


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """[out, in] in the dtype of the activations."""

    weight: Tensor

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


class CutlassLinear(LinearKernel):
    """bfloat16 or float16, sums in float32."""

    name = "linear_cutlass"

    def can_run(self, fmt: QuantFormat, layer: LinearSpec, device: DeviceInfo) -> str | None:
        if fmt.name != "plain":
            return f"runs unquantized weights, not {fmt.name!r}"
        return elsewhere(device, HOPPER, BLACKWELL) or uneven(layer, ALIGNED // 2)

    def pack(self, fmt: QuantFormat, params: dict[str, Tensor], layer: LinearSpec, dtype: torch.dtype) -> PlainWeight:
        whole(layer, ALIGNED // 2)
        weight = fmt.dequantize(params, dtype)
        params.clear()
        return PlainWeight(placed(weight))

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        assert isinstance(weight, PlainWeight)
        from lmkit_op_cutlass.launch import multiply

        out = x.new_empty(*x.shape[:-1], len(weight.weight))
        if out.numel():
            multiply(placed(x), weight.weight, out.view(-1, len(weight.weight)), bias)
        return out


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """weight [out, in] float8; scales float32 by row [out], or by 128 columns [in / 128, out]."""

    weight: Tensor
    scales: Tensor
    by: Literal["rows", "blocks"]
    inputs: Rounding
    input_scale: float = 1.0

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scales.nbytes


class CutlassFp8(LinearKernel):
    """float8 times float8: scales of whole tensors, rows and tokens after the sum, those of columns within it."""

    name = "fp8_cutlass"

    def can_run(self, fmt: QuantFormat, layer: LinearSpec, device: DeviceInfo) -> str | None:
        if not isinstance(fmt, Fp8Format) or fmt.inputs is None:
            return "multiplies float8 by float8; activations of this format stay as they are"
        columns = fmt.block[1] if fmt.block else 0
        if {columns, fmt.inputs.group} not in ({0}, {BLOCK}):
            given = f"{columns or 'all'} and {fmt.inputs.group or 'all'}"
            return f"scales are those of all columns or of {BLOCK}, of weights and activations alike, not {given}"
        made_for = (HOPPER,) if columns else (HOPPER, BLACKWELL)
        return elsewhere(device, *made_for) or uneven(layer, BLOCK if columns else ALIGNED)

    def pack(self, fmt: QuantFormat, params: dict[str, Tensor], layer: LinearSpec, dtype: torch.dtype) -> Fp8Weight:
        assert isinstance(fmt, Fp8Format)
        assert fmt.inputs is not None
        by: Literal["rows", "blocks"] = "blocks" if fmt.block else "rows"
        whole(layer, BLOCK if fmt.block else ALIGNED)
        scales = fmt.row_scales(params).float().t().contiguous()
        input_scale = fmt.input_scale(params) if fmt.inputs.kind == "stored" else 1.0
        weight = placed(params["weight"])
        params.clear()
        return Fp8Weight(weight, scales, by, fmt.inputs, input_scale)

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        assert isinstance(weight, Fp8Weight)
        from lmkit_op_cutlass.launch import multiply

        out = x.new_empty(*x.shape[:-1], len(weight.weight))
        if out.numel():
            codes, scales = weight.inputs.codes(x.reshape(-1, x.shape[-1]), weight.input_scale)
            codes = codes.flatten(1)
            scales = scales.expand(len(codes), 1) if weight.by == "rows" else scales.squeeze(-1).t()
            both = (weight.scales, scales.contiguous())
            multiply(codes, weight.weight, out.view(-1, len(weight.weight)), bias, weight.by, both)
        return out


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """codes int32 [pieces of rows, pieces of columns, 128, 4], factors int32 [groups, rows]: see `codes`."""

    codes: Tensor
    factors: Tensor
    rows: int
    group: int  # columns of a factor; 0 = all
    order: Tensor | None = None  # [in] int64: where the columns of the codes are in x

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.factors.nbytes


class CutlassInt4(LinearKernel):
    """4 bits times bfloat16 or float16: codes less zeros, scaled by group in float32. Activations stay as they are."""

    name = "int4_cutlass"

    def can_run(self, fmt: QuantFormat, layer: LinearSpec, device: DeviceInfo) -> str | None:
        if not isinstance(fmt, IntegerFormat) or fmt.bits != 4:
            return f"runs integers of 4 bits, not {fmt.name!r}"
        if isinstance(fmt, OffsetRows):
            return "zeros are integers of 4 bits, not offsets"
        if fmt.group not in (0, PIECE // 2) and fmt.group % PIECE:
            return f"needs groups of {PIECE // 2} or of multiples of {PIECE} columns, not of {fmt.group}"
        return elsewhere(device, HOPPER) or uneven(layer, ALIGNED // 2)

    def pack(self, fmt: QuantFormat, params: dict[str, Tensor], layer: LinearSpec, dtype: torch.dtype) -> Int4Weight:
        assert isinstance(fmt, IntegerFormat)
        whole(layer, ALIGNED // 2)
        found = fmt.integers(params)
        params.clear()
        if found.offsets is not None or found.table is not None:
            raise ValueError("zeros are integers of 4 bits, not offsets, and codes no entries of a table")
        return Int4Weight(fragments(found.codes), factors(found, dtype), len(found.codes), fmt.group, found.order)

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        assert isinstance(weight, Int4Weight)
        from lmkit_op_cutlass.launch import multiply

        out = x.new_empty(*x.shape[:-1], weight.rows)
        if out.numel():
            x = x if weight.order is None else x[..., weight.order]
            rows = out.view(-1, weight.rows)
            multiply(placed(x), weight.codes, rows, bias, factors=(weight.factors,), group=weight.group)
        return out
