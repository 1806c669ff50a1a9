"""Normalisation."""

from __future__ import annotations

from abc import abstractmethod

import torch
from lmkit.api import Collectives, NormKind, RowOps
from torch import Tensor, nn


class Norm(nn.Module):
    """A norm over the last axis, computed in float32 and rounded once."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, rows: RowOps, *, weight: bool = True) -> None:
        super().__init__()
        if weight:
            self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        else:
            self.register_buffer("weight", torch.ones(size, dtype=dtype, device="cpu"), persistent=False)
        self.eps, self.rows = eps, rows

    @abstractmethod
    def apply_to(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """The norm of x, or of `residual += x` in place; into `out` (which may be `x`) if given."""

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [..., size] -> [..., size], into `out` (which may be `x`) if given."""
        return self.apply_to(x, out=out)

    def add(self, h: Tensor, delta: Tensor | None) -> Tensor:
        """The norm of h [T, D] after `h += delta` in place; None: there is nothing to add yet."""
        return self.apply_to(h) if delta is None else self.apply_to(delta, residual=h)


class RMSNorm(Norm):
    """x / rms(x) * weight."""

    def apply_to(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return self.rows.rms_norm(x, self.weight, self.eps, residual, out)


class LayerNorm(Norm):
    """(x - mean(x)) / std(x) * weight + bias."""

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype, rows: RowOps, *, weight: bool = True, bias: bool = True
    ) -> None:
        super().__init__(size, eps, dtype, rows, weight=weight)
        if bias:
            self.bias = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        else:
            self.register_parameter("bias", None)

    def apply_to(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        y = self.rows.layer_norm(x, self.weight, self.bias, self.eps, residual)
        return y if out is None else out.copy_(y)


def norm_over_ranks(norm: nn.Module, x: Tensor, num: int, ranks: Collectives | None) -> None:
    """The norm over all of `num` heads, of which x [T, heads, D] are this rank's, in place.

    They are brought together, so that ranks get the bits that one would. A head may be that of several ranks.
    """
    if ranks is None or ranks.size == 1:
        whole = x.flatten(1)
        norm(whole, out=whole)
        return
    own = x.shape[1]
    everything = ranks.all_gather(x, 1)[:, :: own * ranks.size // num]
    first = ranks.rank * num // ranks.size
    x.copy_(norm(everything.flatten(1)).view(everything.shape)[:, first : first + own])


def make_norm(kind: NormKind, size: int, eps: float, dtype: torch.dtype, rows: RowOps) -> Norm:
    """A norm of that kind. One with an offset keeps its tensors in float32 (see `describe.one_more`)."""
    family, _, rest = kind.partition("_")
    dtype = torch.float32 if rest == "offset" else dtype
    if family == "rms":
        return RMSNorm(size, eps, dtype, rows, weight=rest != "plain")
    return LayerNorm(size, eps, dtype, rows, weight=rest != "plain", bias=rest in ("", "offset"))
