"""The linear that makes keys and values of latents, used the other way round: attention reads the latents themselves.

A query's product with a key, q @ (W_keys @ latent), is that of (q @ W_keys) with the latent; and the weighted sum of
values is W_values @ the weighted sum of latents.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from lmkit_layers.linear import DenseWeight, Linear

Side = Literal["keys", "values"]


class Latent(nn.Module):
    """`linear`, whose spec is dense, has `plain` outputs of a key and `value` of a value for each head."""

    def __init__(self, linear: Linear, plain: int, value: int) -> None:
        super().__init__()
        self.sizes = (plain, value)
        self._linear = (linear,)  # in a tuple: not a submodule

    @property
    def linear(self) -> Linear:
        return self._linear[0]

    def forward(self, x: Tensor, side: Side) -> Tensor:
        """Queries [T, H, plain] -> what multiplies latents [T, H, rank]; latents that were read -> [T, H, value]."""
        packed = self.linear.packed
        assert isinstance(packed, DenseWeight)
        keys, values = packed.weight.view(-1, sum(self.sizes), packed.weight.shape[1]).split(self.sizes, dim=1)
        return torch.bmm(x.transpose(0, 1), keys if side == "keys" else values.mT).transpose(0, 1)

    def changed(self, x: Tensor, side: Side, a: Tensor, b: Tensor, gain: Tensor | None) -> Tensor:
        """The same where an adapter adds `a` [rank, r] @ `b` [r, H * (plain + value)] and multiplies by `gain`."""
        part = 0 if side == "keys" else 1
        added = b.unflatten(1, (-1, sum(self.sizes))).split(self.sizes, dim=2)[part]
        scale = 1.0 if gain is None else gain.unflatten(0, (-1, sum(self.sizes))).split(self.sizes, dim=1)[part]
        if side == "keys":
            x = x * scale
            return self.forward(x, side) + torch.einsum("thn,rhn->thr", x, added) @ a.T
        return (self.forward(x, side) + torch.einsum("thr,rhn->thn", x @ a, added)) * scale
