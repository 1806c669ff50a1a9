"""Normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lmkit.api import RowOps


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, computed in float32 and rounded once."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, rows: RowOps) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps, self.rows = eps, rows

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self.rows.rms_norm(x, self.weight, self.eps, out=out)

    def add(self, h: Tensor, delta: Tensor | None) -> Tensor:
        """The norm of h [T, D] after `h += delta` in place; None: there is nothing to add yet."""
        if delta is None:
            return self(h)
        return self.rows.rms_norm(delta, self.weight, self.eps, residual=h)
