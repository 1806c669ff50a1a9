"""Token embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Embedding(nn.Module):
    """token ids [T] -> [T, size]."""

    def __init__(self, num: int, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, size, dtype=dtype), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)
