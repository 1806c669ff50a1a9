"""Layers in which a linear, or nothing, stands in place of attention or the MLP."""

from __future__ import annotations

from typing import Any

import torch
from lmkit.api import StepInputs
from lmkit_decoders import Decoder, DecoderLayer
from lmkit_decoders.decoder import Angles, LoneLayer
from torch import Tensor, nn

from lmkit_model_nemotron.model import LoneMLPLayer
from lmkit_model_nemotron.nas import LINEAR, NOTHING


class LinearBlock(nn.Module):
    """In place of attention or of an MLP: hidden [T, D] -> [T, D]."""

    def __init__(self, path: str, specs: Any, ctx: Any) -> None:
        super().__init__()
        self.linear = ctx.linear(specs[f"{path}.linear"])

    def forward(self, h: Tensor, *_: object) -> Tensor:
        return self.linear(h)


class NoAttentionLayer(LoneMLPLayer):
    """Nothing but an MLP, after the norm that it has beside attention."""

    norms = ("mlp_norm",)

    def mix(self, h: Tensor, delta: Tensor | None, angles: Angles | None, x: StepInputs) -> tuple[Tensor, ...]:
        return h, self.mlp_norm.add(h, delta)


class EmptyLayer(DecoderLayer):
    """Nothing at all."""

    norms = ()

    def mix(self, h: Tensor, delta: Tensor | None, angles: Angles | None, x: StepInputs) -> tuple[Tensor, ...]:
        return (h if delta is None else h.add_(delta),)

    def finish(self, h: Tensor) -> Tensor:
        return torch.zeros_like(h)


LAYERS: dict[tuple[bool, bool], type[DecoderLayer]] = {  # by whether there is anything for attention, and for the MLP
    (True, True): DecoderLayer,
    (True, False): LoneLayer,
    (False, True): NoAttentionLayer,
    (False, False): EmptyLayer,
}


class NemotronNasModel(Decoder):
    def make_layer(self, i: int, specs: Any, ctx: Any) -> DecoderLayer:
        given = ctx.info.config["options"]
        makers = {"attn": self.make_attention, "mlp": self.make_mlp}
        parts: dict[str, nn.Module] = {}
        for block, make in makers.items():
            kind = given[block][i]
            if kind != NOTHING:
                parts[block] = LinearBlock(f"layers.{i}.{block}", specs, ctx) if kind == LINEAR else make(i, specs, ctx)
        layer = LAYERS["attn" in parts, "mlp" in parts]
        return layer(self.cfg, parts.get("attn", nn.Identity()), parts.get("mlp", nn.Identity()), ctx)
