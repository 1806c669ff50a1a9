"""Linears stored as 4-bit floating point numbers (E2M1), two to a byte, with a scale for each group of columns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from lmkit.api import (
    CannotSplit,
    CheckpointError,
    IntegerFormat,
    Integers,
    LinearSpec,
    ParamSpec,
    UnsupportedModel,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Twice the number that each code means: a sign, two bits of exponent, one of mantissa.
TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
MX_GROUP, NV_GROUP = 32, 16  # columns that share a scale
BIAS = 127  # of the exponents that are scales
LARGEST = 252  # of them with which all numbers are float32; 255 is no number
HALVES = (104, 143)  # those of which half the scale is a float16
ZERO = 12  # what is added to twice a number, so that none is negative
LEAST = 1e-35  # that the scales of a tensor are divided by: no number leaves float32 then
MOST = 448 * 2.0**15  # likewise: half of the largest scale, 448, has 8 bits as a float16 then
KEEP = "run it where every scale is taken: --op fp4_torch, with experts --op fp4_torch,moe_fp4_torch"


@lru_cache(maxsize=8)
def _table(device: torch.device) -> Tensor:
    """[256, 2] float32: twice the numbers in the low and in the high bits of a byte."""
    import torch

    return torch.tensor([(low, high) for high in TWICE for low in TWICE], dtype=torch.float32, device=device)


def unpack_fp4(codes: Tensor) -> Tensor:
    """uint8 [n, w], two codes in each, the first in the low bits -> the numbers they mean, [n, 2 w] float32."""
    return _table(codes.device).index_select(0, codes.flatten().int()).view(codes.shape[0], -1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp4Format(IntegerFormat):
    """weight[i, j] = number(codes[i, j]) * scales[i, g] / rows[i], where g is the group of column j.

    Twice each number is an integer: kernels of integers look it up in a table, and run them with half the scales.
    `parts` are the rows of each merged part of the whole layer, and `width` its columns, of which a rank may hold a
    share. `codes` is what the tensor of codes, uint8 [out, in / 2], is called.
    """

    parts: tuple[int, ...]
    width: int
    codes: str = "weight_packed"
    bits: int = 4
    activations: Literal["float", "int8"] = "float"
    rounding: Literal["", "symmetric", "range"] = ""

    @abstractmethod
    def scales(self, params: Mapping[str, Tensor]) -> Tensor:
        """[out, groups], of a floating point type that may be small. Raises CheckpointError for what is no number."""

    def rows(self, params: Mapping[str, Tensor]) -> Tensor | None:
        """What the scales of each row are divided by: [out, 1] float64; None: nothing. Raises CheckpointError."""
        return None

    def dequantize(self, params: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Exact, and rounded once."""
        scales, rows = self.scales(params).float(), self.rows(params)
        weight = unpack_fp4(params[self.codes]).unflatten(1, (scales.shape[1], -1)).mul_(scales[..., None]).flatten(1)
        return (weight if rows is None else weight.div_(rows)).to(dtype)

    @abstractmethod
    def halves(self, params: Mapping[str, Tensor]) -> Tensor:
        """Half the scale of each group: [out, groups] float32. Raises CheckpointError for those that are no float16."""

    def integers(self, params: Mapping[str, Tensor]) -> Integers:
        import torch

        halves, codes = self.halves(params), params[self.codes]
        wide = codes.new_empty(codes.shape[0], 2 * codes.shape[1])
        wide[:, ::2], wide[:, 1::2] = codes & 15, codes >> 4
        table = torch.tensor([twice + ZERO for twice in TWICE], dtype=torch.uint8, device=codes.device)
        return Integers(wide, halves, ZERO, table=table)

    def tensors(self, layer: LinearSpec, group: int, scales: str) -> dict[str, ParamSpec]:
        """Codes and scales. Raises UnsupportedModel for groups that do not fit, CannotSplit where a split is why."""
        k, n = layer.in_features, layer.total_out
        if k % group and k == self.width:
            raise UnsupportedModel(f"columns of {layer.name}", k, f"a multiple of {group}")
        if k % group:
            raise CannotSplit(f"{layer.name}: columns that share a scale would lie on two ranks")
        return {self.codes: ParamSpec((n, k // 2), "uint8"), "weight_scale": ParamSpec((n, k // group), scales)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MxFp4(Fp4Format):
    """weight_scale uint8 [out, in / 32]: exponents, of which 127 is 1 (E8M0). Source: OCP Microscaling Formats 1.0.

    As integers they are exact: groups whose scale is none of HALVES are refused then, unless all numbers are 0.
    """

    name: str = "mxfp4"
    group: int = MX_GROUP

    def params(self, layer: LinearSpec, dtype: str) -> dict[str, ParamSpec]:
        return self.tensors(layer, MX_GROUP, "uint8") | _loose(layer, "input_global_scale")

    def scales(self, params: Mapping[str, Tensor]) -> Tensor:
        """bfloat16: every power of two from 2^-127 is one."""
        import torch

        exponents = params["weight_scale"]
        if exponents.numel() and (most := int(exponents.max())) > LARGEST:
            what = "not numbers" if most == 255 else f"too large (2^{most - BIAS})"
            raise CheckpointError(f"scales of 4-bit floats are {what}")
        return torch.exp2(exponents.to(torch.float64) - BIAS).bfloat16()

    def halves(self, params: Mapping[str, Tensor]) -> Tensor:
        exponents, halves = params["weight_scale"], self.scales(params).float() / 2
        far = (exponents < HALVES[0]) | (exponents > HALVES[1])
        if not bool(far.any()):
            return halves
        used = (params[self.codes] & 0x77).ne(0).unflatten(1, (halves.shape[1], -1)).any(2)
        if bool((far & used).any()):
            first = int(exponents[far & used][0]) - BIAS
            low, high = (end - BIAS for end in HALVES)
            raise CheckpointError(f"has a scale of 2^{first}; as integers, 2^{low} to 2^{high} are exact", fix=KEEP)
        return halves.masked_fill(far, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NvFp4(Fp4Format):
    """weight_scale float8_e4m3fn [out, in / 16], with a float32 number `whole` for each merged part.

    Scales are divided by it, or if `times` multiplied. As integers, what that gives is rounded to float16. Sources:
    `NVFP4PackedCompressor` of compressed-tensors, and `NVFP4QTensor` of ModelOpt.
    """

    name: str = "nvfp4"
    group: int = NV_GROUP
    whole: str = "weight_global_scale"
    times: bool = False

    def params(self, layer: LinearSpec, dtype: str) -> dict[str, ParamSpec]:
        ones = (1,) * len(layer.out_features)
        return {
            **self.tensors(layer, NV_GROUP, "float8_e4m3fn"),
            self.whole: ParamSpec((len(ones),), "float32", part_sizes=ones),
            **_loose(layer, "input_scale" if self.times else "input_global_scale"),
        }

    def scales(self, params: Mapping[str, Tensor]) -> Tensor:
        scales = params["weight_scale"]
        if not bool(scales.float().isfinite().all()):
            raise CheckpointError("scales of 4-bit floats are not numbers")
        return scales

    def rows(self, params: Mapping[str, Tensor]) -> Tensor:
        import torch

        whole, height = params[self.whole].double(), params[self.codes].shape[0]
        whole = whole.reciprocal() if self.times else whole
        if not bool((whole.isfinite() & (whole > LEAST)).all()):
            shown = ", ".join(f"{number:.3g}" for number in params[self.whole].tolist()[:4])
            raise CheckpointError(f"{self.whole} is {shown}, and needs positive numbers of usual size")
        rows = torch.tensor([n * height // sum(self.parts) for n in self.parts])  # of this rank
        return whole.repeat_interleave(rows.to(whole.device)).unsqueeze(1)

    def halves(self, params: Mapping[str, Tensor]) -> Tensor:
        import torch

        scales, rows = self.scales(params).double(), self.rows(params)
        halves = (scales / rows / 2).float()
        if bool((halves.abs() > torch.finfo(torch.float16).max).any()):
            raise CheckpointError("has scales above 2^17, which are no float16", fix=KEEP)
        if bool((rows > MOST).any()):
            raise CheckpointError(f"has no scales above {448 / MOST:.1e}, where a float16 has few digits", fix=KEEP)
        return halves


def _loose(layer: LinearSpec, name: str) -> dict[str, ParamSpec]:
    """What says how activations may be rounded; they are not."""
    ones = (1,) * len(layer.out_features)
    return {name: ParamSpec((len(ones),), "float32", part_sizes=ones, optional=True)}
