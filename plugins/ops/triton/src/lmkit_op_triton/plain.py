"""Linears over weights as they are: of one row and of a few by kernels of our own, of more by torch."""

from __future__ import annotations

import triton
from lmkit.api import DeviceInfo, LinearSpec, PackedWeight, QuantFormat
from lmkit_layers.linear import DenseWeight, ReferenceLinear
from torch import Tensor

from lmkit_op_triton import row_kernels as kernels
from lmkit_op_triton.rowops import refusal_of_device
from lmkit_op_triton.tiles import tile_for

FEW = 16  # rows, which one instruction of a tensor core multiplies


class TritonPlainLinear(ReferenceLinear):
    """Reads a weight once, at nearly the bandwidth of memory; cuBLAS does not where there are few rows.

    A row of x has the same result beside up to 15 others, another one alone, and another one among more.
    """

    name = "plain_triton"

    def can_run(self, fmt: QuantFormat, layer: LinearSpec, device: DeviceInfo) -> str | None:
        if reason := refusal_of_device(device):
            return reason
        return None if fmt.name == "plain" else f"runs weights as they are, not {fmt.name}"

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        assert isinstance(weight, DenseWeight)
        w, rows = weight.weight, x.reshape(-1, x.shape[-1])
        if not 0 < len(rows) <= FEW or x.itemsize > 2 or x.dtype != w.dtype or w.stride(1) != 1:
            return super().apply(x, weight, bias)
        (m, k), n = rows.shape, len(w)
        if k != w.shape[1]:
            raise ValueError(f"a linear of {w.shape[1]} to {n} values got {list(x.shape)}")
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        out, tile, given = x.new_empty(m, n), tile_for(x.device, "linear plain", m), x if bias is None else bias
        grid = (triton.cdiv(n, tile.n),)
        if m == 1:
            kernels.one_row[grid](
                rows, w, given, out, n, k, w.stride(0), bias is not None, tile.n, tile.k, tile.stages,
                num_warps=tile.warps,
            )  # fmt: skip
        else:
            kernels.few_rows[grid](
                rows, w, given, out, m, n, k, rows.stride(0), w.stride(0), bias is not None, FEW, tile.n, tile.k,
                tile.stages, num_warps=tile.warps,
            )  # fmt: skip
        return out.view(*x.shape[:-1], n)
