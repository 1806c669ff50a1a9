"""Falcon-H1: attention and Mamba 2 read the same tokens, and the sum of what they say goes on."""

from __future__ import annotations

from typing import Any

import torch
from lmkit.api import StepInputs
from lmkit_decoders import Decoder, GatedMLP, Mamba2, SelfAttention
from lmkit_decoders.decoder import Angles
from torch import Tensor

from lmkit_model_falcon.h1 import FalconH1Config


class ScaledMamba(Mamba2):
    def __init__(self, cfg: Any, layer: int, specs: Any, ctx: Any) -> None:
        super().__init__(cfg, layer, specs, ctx)
        given, sizes = ctx.info.config["options"], self.in_proj.spec.out_features
        factors = [factor for factor, size in zip(given["ssm"], sizes, strict=True) for _ in range(size)]
        self.register_buffer("factors", torch.tensor(factors, dtype=ctx.dtype, device="cpu"), persistent=False)
        self.scale_in, self.scale_out = given["ssm_in"], given["ssm_out"]

    def project(self, h: Tensor) -> Tensor:
        return super().project(h * self.scale_in) * self.get_buffer("factors")

    def forward(self, h: Tensor, angles: object, x: StepInputs) -> Tensor:
        return super().forward(h, angles, x) * self.scale_out


class ParallelAttention(SelfAttention):
    def __init__(self, cfg: Any, layer: int, specs: Any, ctx: Any) -> None:
        super().__init__(cfg, layer, specs, ctx)
        given = ctx.info.config["options"]
        self.scale_in, self.scale_out = given["attention_in"], given["attention_out"]
        self.mixer = ScaledMamba(cfg, layer, specs, ctx)

    def forward(self, h: Tensor, angles: Angles | None, x: StepInputs) -> Tensor:
        return super().forward(h * self.scale_in, angles, x) * self.scale_out + self.mixer(h, angles, x)


class ScaledMLP(GatedMLP):
    def __init__(self, cfg: Any, path: str, specs: Any, ctx: Any) -> None:
        super().__init__(cfg, path, specs, ctx)
        self.scale_gate, self.scale_out = ctx.info.config["options"]["mlp"]

    def forward(self, h: Tensor) -> Tensor:
        gate, up = self.gate_up(h).chunk(2, dim=-1)
        return self.down(self.rows.activate(gate * self.scale_gate, self.act) * up) * self.scale_out


class FalconH1Model(Decoder):
    config = FalconH1Config
    attention = ParallelAttention
    gated_mlp = ScaledMLP
