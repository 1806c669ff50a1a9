"""Mamba blocks. They stand where attention stands: block(h [T, D], angles, x) -> [T, D]."""

from __future__ import annotations

from typing import Any

import torch
from lmkit.api import BuildContext, StepInputs
from lmkit_layers.norm import RMSNorm
from torch import Tensor, nn
from torch.nn import functional as F

from lmkit_decoders.delta import Conv1d
from lmkit_decoders.describe import DecoderConfig
from lmkit_decoders.mlp import Specs
from lmkit_decoders.recurrent import recurrent_ops


class GatedNorm(nn.Module):
    """y * silu(gate), with an RMS norm in groups of channels after it, before it, or none.

    y [T, D] float32, gate [T, D] -> [T, D] in the gate's dtype.
    """

    def __init__(self, kind: str, size: int, groups: int, eps: float, ctx: BuildContext) -> None:
        super().__init__()
        if kind != "none":
            self.weight = nn.Parameter(torch.empty(size, dtype=ctx.dtype), requires_grad=False)
        self.kind, self.groups = kind, groups
        self.length = RMSNorm(size // groups, eps, torch.float32, ctx.rows, weight=False)

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        opened = F.silu(gate.float())
        if self.kind == "before":
            y = self.norm(y) * opened
        else:
            y = y * opened if self.kind == "none" else self.norm(y * opened)
        return y.to(gate.dtype)

    def norm(self, y: Tensor) -> Tensor:
        return self.length(y.unflatten(-1, (self.groups, -1))).flatten(-2) * self.weight


class Mamba(nn.Module):
    """Mamba (1); see `mixers.mamba_mixer` for its configuration."""

    def __init__(self, cfg: DecoderConfig, layer: int, specs: Specs, ctx: BuildContext) -> None:
        super().__init__()
        assert cfg.mixer is not None
        given, self.layer, path = cfg.mixer.options, layer, cfg.mixer_path(layer)
        self.ops = recurrent_ops(ctx)
        self.sizes = given["rank"], given["state_size"], given["state_size"]
        names = "in_proj", "x_proj", "dt_proj", "out_proj"
        self.in_proj, self.x_proj, self.dt_proj, self.out_proj = (ctx.linear(specs[f"{path}.{n}"]) for n in names)
        self.conv = Conv1d(given["size"], given["width"], ctx, given["conv_bias"])
        self.A = nn.Parameter(torch.empty(given["size"], given["state_size"], dtype=torch.float32), requires_grad=False)
        self.D = nn.Parameter(torch.empty(given["size"], dtype=torch.float32), requires_grad=False)
        norms: list[Any] = [nn.Identity()] * 3
        if given["norm"]:
            norms = [ctx.norm(size, given["norm_eps"], given["norm"]) for size in self.sizes]
        self.dt_norm, self.b_norm, self.c_norm = norms

    def forward(self, h: Tensor, angles: object, x: StepInputs) -> Tensor:
        assert x.state is not None
        state = x.state.tensors[self.layer]
        y, gate = self.in_proj(h).chunk(2, dim=-1)
        y = F.silu(self.conv(y, state["conv"], x))
        dt, b, c = self.x_proj(y).split(self.sizes, dim=-1)
        dt = F.softplus(self.dt_proj(self.dt_norm(dt).contiguous()).float())
        b, c = self.b_norm(b).float(), self.c_norm(c).float()
        y = self.ops.selective_scan(y.float(), dt, self.A, b, c, self.D, state["ssm"], x.state)
        return self.out_proj((y * F.silu(gate.float())).to(h.dtype))


class Mamba2(nn.Module):
    """Mamba 2; see `mixers.mamba2_mixer` for its configuration."""

    def __init__(self, cfg: DecoderConfig, layer: int, specs: Specs, ctx: BuildContext) -> None:
        super().__init__()
        assert cfg.mixer is not None
        given, self.layer, path = cfg.mixer.options, layer, cfg.mixer_path(layer)
        self.ops = recurrent_ops(ctx)
        self.heads, self.groups, self.limits = given["heads"], given["groups"], tuple(given["dt_limits"])
        size, bc = given["heads"] * given["head_dim"], given["groups"] * given["state_size"]
        self.split, self.mixed = (size, size + 2 * bc, given["heads"]), (size, bc, bc)
        self.in_proj, self.out_proj = ctx.linear(specs[f"{path}.in_proj"]), ctx.linear(specs[f"{path}.out_proj"])
        self.conv = Conv1d(size + 2 * bc, given["width"], ctx, given["conv_bias"])
        self.A, self.D, self.dt_bias = (
            nn.Parameter(torch.empty(self.heads, dtype=torch.float32), requires_grad=False) for _ in range(3)
        )
        self.norm = GatedNorm(given["norm"], size, given["norm_groups"], given["norm_eps"] or cfg.norm_eps, ctx)

    def forward(self, h: Tensor, angles: object, x: StepInputs) -> Tensor:
        assert x.state is not None
        state = x.state.tensors[self.layer]
        gate, mixed, dt = self.project(h).split(self.split, dim=-1)
        y, b, c = F.silu(self.conv(mixed, state["conv"], x)).float().split(self.mixed, dim=-1)
        y, b, c = y.unflatten(1, (self.heads, -1)), b.unflatten(1, (self.groups, -1)), c.unflatten(1, (self.groups, -1))
        dt = F.softplus(dt.float() + self.dt_bias).clamp(*self.limits)
        y = self.ops.ssd(y, dt, self.A, b, c, self.D, state["ssm"], x.state)
        return self.out_proj(self.norm(y.flatten(1), gate))

    def project(self, h: Tensor) -> Tensor:
        """Gate, x, b, c and time steps side by side."""
        return self.in_proj(h)
