"""Nemotron-H: layers that are an MLP alone, and experts that read and write narrow vectors."""

from __future__ import annotations

from typing import Any

from lmkit.api import StepInputs
from lmkit_decoders import Decoder, DecoderLayer, Mamba2, MoE
from lmkit_decoders.decoder import Angles, LoneLayer
from torch import Tensor, nn

from lmkit_model_nemotron.hybrid import NemotronConfig


class LoneMLPLayer(LoneLayer):
    """Nothing but an MLP."""

    def mix(self, h: Tensor, delta: Tensor | None, angles: Angles | None, x: StepInputs) -> tuple[Tensor, ...]:
        return h, self.attn_norm.add(h, delta)

    def finish(self, h: Tensor, mixed: Tensor) -> Tensor:
        return self.scaled(self.mlp(mixed))


class NemotronExperts(MoE):
    """Routed experts of which each reads and writes a narrow vector, where the file says so."""

    def __init__(self, cfg: NemotronConfig, path: str, specs: Any, ctx: Any) -> None:
        super().__init__(cfg, path, specs, ctx)
        self.latent_in, self.latent_out = (
            ctx.linear(specs[f"{path}.latent_{side}"]) if cfg.latent else nn.Identity() for side in ("in", "out")
        )

    def forward(self, h: Tensor) -> Tensor:
        ids, weights = self.router(h)
        return self.with_shared(self.latent_out(self.experts(self.latent_in(h), ids, weights)), h)


class NemotronHModel(Decoder):
    config = NemotronConfig
    cfg: NemotronConfig
    mixer = Mamba2
    moe = NemotronExperts

    def make_layer(self, i: int, specs: Any, ctx: Any) -> DecoderLayer:
        if i in self.cfg.mlp_only:
            return LoneMLPLayer(self.cfg, nn.Identity(), self.make_mlp(i, specs, ctx), ctx)
        return super().make_layer(i, specs, ctx)
