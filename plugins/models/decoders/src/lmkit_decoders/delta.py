"""Gated delta nets: linear attention whose state forgets, and corrects what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from lmkit.api import BuildContext, StepInputs
from lmkit_layers.norm import Norm
from torch import Tensor, nn
from torch.nn import functional as F

from lmkit_decoders.describe import DecoderConfig
from lmkit_decoders.mlp import Specs
from lmkit_decoders.recurrent import recurrent_ops


class Conv1d(nn.Module):
    """A causal convolution of each channel: [T, C] -> [T, C]; the last width - 1 tokens are state.

    `parts` are the channels of each tensor where files divide the weight.
    """

    def __init__(
        self, channels: int, width: int, ctx: BuildContext, bias: bool = False, parts: Mapping[str, int] | None = None
    ) -> None:
        super().__init__()
        self.parts, self.ops, dtype = {"weight": parts} if parts else {}, recurrent_ops(ctx), ctx.dtype
        self.weight = nn.Parameter(torch.empty(channels, 1, width, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(channels, dtype=dtype), requires_grad=False) if bias else None

    def forward(self, h: Tensor, state: Tensor, x: StepInputs) -> Tensor:
        assert x.state is not None
        return self.ops.causal_conv1d(h, self.weight[:, 0], self.bias, state, x.state)


class GatedDeltaNet(nn.Module):
    """hidden [T, D] -> [T, D]. Stands where attention stands; see `family.delta_mixer` for its configuration."""

    def __init__(self, cfg: DecoderConfig, layer: int, specs: Specs, ctx: BuildContext) -> None:
        super().__init__()
        assert cfg.mixer is not None
        given, self.layer, path = cfg.mixer.options, layer, cfg.mixer_path(layer)
        self.k_heads, self.v_heads = given["k_heads"], given["v_heads"]
        self.k_size, self.v_size = self.k_heads * given["k_dim"], self.v_heads * given["v_dim"]
        self.beta = given["beta"]
        self.qkvz, self.ba, self.o = (ctx.linear(specs[f"{path}.{name}"]) for name in ("qkvz", "ba", "o"))
        parts = {"q": self.k_size, "k": self.k_size, "v": self.v_size}
        self.conv, self.ops = Conv1d(sum(parts.values()), given["width"], ctx, parts=parts), recurrent_ops(ctx)
        self.A_log = nn.Parameter(torch.empty(self.v_heads, dtype=torch.float32), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(self.v_heads, dtype=torch.float32), requires_grad=False)
        self.norm = cast("Norm", ctx.norm(given["v_dim"], given["eps"]))

    def forward(self, h: Tensor, angles: object, x: StepInputs) -> Tensor:
        assert x.state is not None
        state = x.state.tensors[self.layer]
        qkv, z = self.qkvz(h).split((2 * self.k_size + self.v_size, self.v_size), dim=-1)
        qkv = F.silu(self.conv(qkv, state["conv"], x))
        q, k, v = qkv.split((self.k_size, self.k_size, self.v_size), dim=-1)
        b, a = self.ba(h).float().chunk(2, dim=-1)
        y = self.ops.gated_delta_rule(
            q.unflatten(1, (self.k_heads, -1)),
            k.unflatten(1, (self.k_heads, -1)),
            v.unflatten(1, (self.v_heads, -1)),
            -self.A_log.exp() * F.softplus(a + self.dt_bias),
            b.sigmoid() * self.beta,
            state["delta"],
            x.state,
        )
        return self.o(self.norm(y).flatten(1) * F.silu(z))
