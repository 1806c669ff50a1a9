"""Token embedding."""

from __future__ import annotations

import torch
from lmkit.api import RowOps
from torch import Tensor, nn


class Embedding(nn.Module):
    """token ids [T] -> [T, size]."""

    def __init__(self, num: int, size: int, dtype: torch.dtype, rows: RowOps) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, size, dtype=dtype), requires_grad=False)
        self.rows = rows

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.rows.embed(token_ids, self.weight)
