"""bfloat16 linears with the weight laid out once as oneDNN's matrix kernels want it, instead of at every call.

The results are those of torch's own linear, bit for bit; only the time differs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lmkit.api import DeviceInfo, LinearSpec, PackedWeight, QuantFormat
from torch import Tensor
from torch.nn import functional as F

# Heads over a vocabulary keep the plain layout: with tied embeddings a second copy would cost up to a quarter of the
# model, and for the single row of a lone decode torch's matrix-vector product is as fast.
MAX_PACKED = 32768


@dataclass(frozen=True, slots=True)
class OneDnnWeight:
    """`weight` is [out, in], in oneDNN's blocked layout if `blocked`."""

    weight: Tensor
    blocked: bool
    nbytes: int


class OneDnnLinear:
    name = "linear_onednn"

    def can_run(self, fmt: QuantFormat, layer: LinearSpec, device: DeviceInfo) -> str | None:
        if fmt.name != "plain":
            return f"runs unquantized weights, not {fmt.name}"
        if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
            return "this torch was built without oneDNN, or without its prepacked linear"
        return None

    def pack(self, fmt: QuantFormat, params: dict[str, Tensor], layer: LinearSpec, dtype: torch.dtype) -> OneDnnWeight:
        weight = fmt.dequantize(params, dtype)
        params.clear()
        size = weight.nbytes
        blocked = dtype == torch.bfloat16 and layer.total_out <= MAX_PACKED
        if blocked:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        return OneDnnWeight(weight, blocked, size)

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        assert isinstance(weight, OneDnnWeight)
        if weight.blocked:
            return torch.ops.mkldnn._linear_pointwise(x, weight.weight, bias, "none", [], "")
        if x.dim() == 2 and len(x) == 1 and bias is None:
            return torch.mv(weight.weight, x[0])[None]
        return F.linear(x, weight.weight, bias)
