"""The place where a model meets the attention backend."""

from __future__ import annotations

import torch
from lmkit.api import AttentionBackend, AttnNeed, RotatingAttention, StepInputs
from torch import Tensor, nn


class Attention(nn.Module):
    """attn(q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], x) -> [T, Hq * Dv]: writes the KV cache, then reads it.

    With `angles` (cos, sin, interleaved) it first turns q and k in place; only where it `rotates`.
    `layer` is that whose cache it is; unless `writes`, another one has written it, and k and v are not looked at.
    In the `last` layer nothing is read where the step's hidden states are not: the result is zeros.
    """

    def __init__(
        self, backend: AttentionBackend, need: AttnNeed, layer: int, group: int, scale: float, writes: bool = True,
        last: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.last = last
        self.backend, self.layer, self.group, self.scale, self.writes = backend, layer, group, scale, writes
        self.rotates = writes and isinstance(backend, RotatingAttention)
        self.v_head_dim = need.v_head_dim or need.head_dim
        if need.sinks:
            self.sinks = nn.Parameter(torch.empty(need.num_q_heads, dtype=torch.float32), requires_grad=False)
        else:
            self.register_parameter("sinks", None)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, x: StepInputs, angles: tuple[Tensor, Tensor, bool] | None = None
    ) -> Tensor:
        plan, kv = x.attn[self.group], x.kv[self.layer]
        if angles is not None:
            assert isinstance(self.backend, RotatingAttention)
            self.backend.rotate_write(q, k, v, kv, plan.slots, *angles)
        elif self.writes:
            self.backend.write_kv(k, v, kv, plan.slots)
        if self.last and x.only_logits and not len(x.logits_rows):
            return q.new_zeros(q.shape[0], q.shape[1] * self.v_head_dim)
        out = q.new_empty(q.shape[0], q.shape[1], self.v_head_dim)
        if self.sinks is None:
            self.backend.forward(q, kv, plan, self.scale, out)
        else:
            self.backend.forward(q, kv, plan, self.scale, out, self.sinks)
        return out.flatten(1)


def grow(q: Tensor, positions: Tensor, beta: float, length: float) -> None:
    """Queries [T, H, D] times 1 + beta * log(1 + position // length), in place: long contexts stay in focus."""
    q *= (1 + beta * torch.log1p(positions // length)).to(q.dtype)[:, None, None]
