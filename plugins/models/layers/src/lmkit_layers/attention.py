"""The place where a model meets the attention backend."""

from __future__ import annotations

import math
from typing import cast

import torch
from lmkit.api import AttentionBackend, AttnNeed, CheckpointError, RotatingAttention, StepInputs
from torch import Tensor, nn

SCALES = ("k_scale", "v_scale")  # what cached keys and values of a float8 cache are multiplied by


class Attention(nn.Module):
    """attn(q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], x) -> [T, Hq * Dv]: writes the KV cache, then reads it.

    With `angles` (cos, sin, interleaved) it first turns q and k in place; only where it `rotates`.
    `layer` is that whose cache it is; with `writer` that module has written it, and k and v are not looked at.
    A float8 cache holds keys and values divided by the checkpoint's scales, if it has any: one for all keys, one for
    all values; that of keys, where values are a part of them. Backends know nothing of it.
    In the `last` layer nothing is read where the step's hidden states are not: the result is zeros.
    """

    optional = SCALES

    def __init__(
        self, backend: AttentionBackend, need: AttnNeed, layer: int, group: int, scale: float,
        writer: Attention | None = None, last: bool = False,
        ranks: tuple[int, int] = (0, 1),
    ) -> None:  # fmt: skip
        super().__init__()
        self.rank = ranks[0]
        self.last, self.writes = last, writer is None
        self.backend, self.layer, self.group, self.scale = backend, layer, group, scale
        self.rotates = self.writes and isinstance(backend, RotatingAttention)
        self.scales: tuple[float, float] | None = None  # of keys and of values, where they are not 1
        self.writer = (writer or self,)  # in a tuple: not a submodule
        if self.writes and need.kv_dtype.startswith("float8"):
            for name in SCALES:
                self.register_parameter(name, nn.Parameter(torch.empty(1), requires_grad=False))
        self.v_head_dim, self.mla = need.v_head_dim or need.head_dim, need.mla
        if need.sinks:
            self.sinks = nn.Parameter(
                torch.empty(need.num_q_heads * ranks[1], dtype=torch.float32), requires_grad=False
            )
        else:
            self.register_parameter("sinks", None)

    def settle(self) -> None:
        """Takes the scales that were loaded; one stands for both. Raises CheckpointError where one is not positive."""
        found = {name: float(p) for name, p in self.named_parameters(recurse=False) if name in SCALES}
        for name, value in found.items():
            if not 0 < value < math.inf:
                raise CheckpointError(f"{name} is {value:g}, not a positive number", fix="--kv-dtype auto")
        both = next(iter(found.values()), 1.0)
        k, v = (found.get(name, both) for name in SCALES)
        v = k if self.mla else v  # they are stored as keys
        self.scales = None if k == v == 1.0 else (k, v)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, x: StepInputs, angles: tuple[Tensor, Tensor, bool] | None = None
    ) -> Tensor:
        plan, kv, scale, scales = x.attn[self.group], x.kv[self.layer], self.scale, self.writer[0].scales
        if scales is not None:
            scale *= scales[0]
            if self.writes:
                k, v = k * (1 / scales[0]), v * (1 / scales[1])
        if angles is not None:
            backend = cast("RotatingAttention", self.backend)  # `rotates` says so: asking costs as much as an operator
            backend.rotate_write(q, k, v, kv, plan.slots, *angles)
        elif self.writes:
            self.backend.write_kv(k, v, kv, plan.slots)
        if self.last and x.only_logits and not len(x.logits_rows):
            return q.new_zeros(q.shape[0], q.shape[1] * self.v_head_dim)
        out = q.new_empty(q.shape[0], q.shape[1], self.v_head_dim)
        if self.sinks is None:
            self.backend.forward(q, kv, plan, scale, out)
        else:
            first = self.rank * q.shape[1]  # sinks are those of all ranks
            self.backend.forward(q, kv, plan, scale, out, self.sinks[first : first + q.shape[1]])
        if scales is not None:
            out *= scales[1]
        return out.flatten(1)


def grow(q: Tensor, positions: Tensor, beta: float, length: float) -> None:
    """Queries [T, H, D] times 1 + beta * log(1 + position // length), in place: long contexts stay in focus."""
    q *= (1 + beta * torch.log1p(positions // length)).to(q.dtype)[:, None, None]
