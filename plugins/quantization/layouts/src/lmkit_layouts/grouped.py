"""Linears stored as codes in 32-bit words, with a scale and a zero for each group of columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lmkit.api import CannotSplit, CheckpointError, IntegerFormat, Integers, LinearSpec, ParamSpec, UnsupportedModel

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TENSORS = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedIntegers(IntegerFormat):
    """w[i, j] = (codes[i, j] - zeros[i, g]) * scales[i, g]. Subclasses say where the codes lie.

    `stored_bits` of each code in the file; kernels see 4 for what has 4 or fewer. `parts` are the rows of each merged
    part of the whole layer and `width` its columns, of which a rank may hold a share.
    """

    stored_bits: int
    group: int  # columns per scale; 0 = one scale per row
    parts: tuple[int, ...]
    width: int
    activations: Literal["float", "int8"] = "int8"
    ordered: bool = False  # columns of a group need not lie side by side
    bits: int = 4
    name: str = "int4"
    rounding: Literal["", "symmetric", "range"] = ""

    def num_groups(self, columns: int) -> int:
        return -(-columns // self.group) if self.group else 1

    def dequantize(self, params: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return dequantize(self.integers(params), self.group).to(dtype)

    def column_order(self, group_of: Tensor | None, columns: int) -> Tensor | None:
        """The columns, those of a group side by side; None: they lie so. Raises CheckpointError."""
        import torch

        if group_of is None or not self.group or columns != self.width:
            return None
        wanted = torch.arange(columns, dtype=group_of.dtype, device=group_of.device) // self.group
        if torch.equal(group_of, wanted):
            return None
        if not self.ordered or not torch.equal(group_of.sort().values, wanted):
            what = "groups of equal size" if self.ordered else "columns in their own order, as desc_act is false"
            raise CheckpointError(f"g_idx does not name {what}")
        return group_of.argsort(stable=True)

    def check(self, layer: LinearSpec, columns: int, rows: int) -> None:
        """Whether the codes of `layer`, or of a rank's share of it, fill whole words of `columns` or `rows` codes.

        Raises UnsupportedModel, or CannotSplit where it is the split that does not fit.
        """
        if layer.in_features % columns and layer.in_features == self.width:
            raise UnsupportedModel(f"columns of {layer.name}", layer.in_features, f"a multiple of {columns}")
        bad = [n for n in layer.out_features if n % rows]
        if bad and layer.out_features == self.parts:
            raise UnsupportedModel(f"rows of {layer.name}", bad[0], f"a multiple of {rows}")
        if layer.in_features != self.width and (self.ordered or layer.in_features % (self.group or 1)):
            raise CannotSplit(f"{layer.name}: columns that share a scale would lie on two ranks")
        if bad or layer.in_features % columns:
            raise CannotSplit(f"{layer.name}: weights that share a word would lie on two ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqWords(GroupedIntegers):
    """qweight int32 [in * bits / 32, out]: streams of bits along the columns of x.

    qzeros are int32 [groups, out * bits / 32], scales float16 [groups, out]; g_idx int32 [in] names the group of each
    column. `version` 1 stores zeros less one. Source: `pack` of GPTQModel's linear layers, and its
    `convert_gptq_v1_to_v2_format_module`.
    """

    version: int = 1

    def params(self, layer: LinearSpec, dtype: str) -> dict[str, ParamSpec]:
        self.check(layer, 32, 32)
        k, n, groups = layer.in_features, layer.total_out, self.num_groups(layer.in_features)
        words = tuple(size * self.stored_bits // 32 for size in layer.out_features)
        return {
            "qweight": ParamSpec((k * self.stored_bits // 32, n), "int32", part_axis=1),
            "qzeros": ParamSpec((groups, sum(words)), "int32", part_axis=1, part_sizes=words),
            "scales": ParamSpec((groups, n), "float16", part_axis=1),
            "g_idx": ParamSpec((k,), "int32", part_axis=None, optional=True),
        }

    def integers(self, params: Mapping[str, Tensor]) -> Integers:
        from lmkit_layouts.words import unpack

        codes = unpack(params["qweight"].t(), self.stored_bits)
        zeros, mask = params["qzeros"], (1 << self.stored_bits) - 1
        if self.version == 1 and self.stored_bits != 3:  # whole words were made less, with what that carries over
            zeros = zeros + sum(1 << shift for shift in range(0, 32, self.stored_bits))
        zeros = unpack(zeros, self.stored_bits)
        if self.version == 1 and self.stored_bits == 3:
            zeros = (zeros + 1) & mask
        order = self.column_order(params.get("g_idx"), codes.shape[1])
        codes = codes if order is None else codes[:, order]
        return Integers(codes, finite(params["scales"].t().contiguous()), uniform(zeros.t().contiguous()), order)


@dataclass(frozen=True, slots=True, kw_only=True)
class AwqWords(GroupedIntegers):
    """qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], 4 bits of eight columns interleaved in each word;
    scales float16 [groups, out]. Source: `WQLinear_GEMM.from_linear` of AutoAWQ."""

    stored_bits: int = 4

    def params(self, layer: LinearSpec, dtype: str) -> dict[str, ParamSpec]:
        self.check(layer, self.group or 1, 8)
        k, groups = layer.in_features, self.num_groups(layer.in_features)
        words = tuple(size // 8 for size in layer.out_features)
        return {
            "qweight": ParamSpec((k, sum(words)), "int32", part_axis=1, part_sizes=words),
            "qzeros": ParamSpec((groups, sum(words)), "int32", part_axis=1, part_sizes=words),
            "scales": ParamSpec((groups, layer.total_out), "float16", part_axis=1),
        }

    def integers(self, params: Mapping[str, Tensor]) -> Integers:
        from lmkit_layouts.words import unpack_awq

        codes, zeros = unpack_awq(params["qweight"]), unpack_awq(params["qzeros"])
        scales = finite(params["scales"].t().contiguous())
        return Integers(codes.t().contiguous(), scales, uniform(zeros.t().contiguous()))


def finite(scales: Tensor) -> Tensor:
    """The same. Raises CheckpointError for what is no number, or too large for the float16 of kernels."""
    if not bool(scales.half().isfinite().all()):
        raise CheckpointError("scales are not numbers, or too large (more than 65504)")
    return scales


def uniform(zeros: Tensor) -> Tensor | int:
    """One number where all are equal, as in symmetric formats: kernels need not read them then."""
    first = int(zeros.flatten()[0]) if zeros.numel() else 0
    return first if bool((zeros == first).all()) else zeros


def dequantize(found: Integers, group: int) -> Tensor:
    """[out, in] float32. `group` columns of the codes share a scale; 0 = all."""
    import torch

    k = found.codes.shape[1]
    span = group or max(k, 1)
    scales = found.scales.float().repeat_interleave(span, 1)[:, :k]
    zeros = found.zeros
    if isinstance(zeros, torch.Tensor):
        zeros = zeros.float().repeat_interleave(span, 1)[:, :k]
    weight = (found.codes.float() - zeros) * scales
    if found.offsets is not None:
        weight -= found.offsets.float().repeat_interleave(span, 1)[:, :k]
    if found.order is None:
        return weight
    placed = torch.empty_like(weight)
    placed[:, found.order] = weight
    return placed
