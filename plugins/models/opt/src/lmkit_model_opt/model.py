"""OPT where it is not like its neighbours: narrow embeddings (350M), norms after what is added, no last norm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from lmkit.api import BuildContext, ModelInfo, StepInputs
from lmkit_decoders import Decoder, DecoderLayer
from lmkit_decoders.decoder import Angles
from lmkit_layers import Linear
from torch import Tensor, nn

from lmkit_model_opt.arch import FIRST_ROW, projections


class AfterLayer(DecoderLayer):
    """The sum of the residual stream and what a block adds to it is normed: nothing is left to be added."""

    def mix(self, h: Tensor, delta: Tensor | None, angles: Angles | None, x: StepInputs) -> tuple[Tensor, ...]:
        return h, self.attn(h, angles, x)

    def finish(self, h: Tensor, mixed: Tensor) -> Tensor:
        h.copy_(self.attn_norm.add(h, mixed))
        h.copy_(self.mlp_norm.add(h, self.mlp(h)))
        return cast("Tensor", None)


class NoNorm(nn.Module):
    def add(self, h: Tensor, delta: Tensor | None) -> Tensor:
        return h if delta is None else h.add_(delta)


class BioGpt(Decoder):
    def rows_of_positions(self, positions: Tensor) -> Tensor:
        return positions + FIRST_ROW


class OptModel(BioGpt):
    def __init__(self, info: ModelInfo, ctx: BuildContext) -> None:
        options: Any = info.config["options"]
        self.norms_before = bool(options["norms_before"])
        super().__init__(info, ctx)
        if not options["final_norm"]:
            self.norm: Any = NoNorm()
        size, hidden = options["size"], info.hidden_size
        self.project_in, self.project_out = None, None
        if size != hidden:
            self.project_in, self.project_out = (ctx.linear(spec) for spec in projections(hidden, size))
            self.embed = ctx.embedding(info.vocab_size, size)
            head = next((spec for spec in info.linears if spec.name == "lm_head"), None)
            if head is None:
                self.lm_head = cast("Linear", ctx.linear(replace(self.cfg.head(), in_features=size)))
                self.lm_head.tie(self.embed)

    def make_layer(self, i: int, specs: Any, ctx: BuildContext) -> DecoderLayer:
        if self.norms_before:
            return super().make_layer(i, specs, ctx)
        attn, mlp = self.make_attention(i, specs, ctx), self.make_mlp(i, specs, ctx)
        return AfterLayer(self.cfg, attn, mlp, ctx)

    def embeddings(self, x: StepInputs) -> Tensor:
        if self.project_in is None:
            return super().embeddings(x)
        assert self.positions is not None
        h = self.embed(x.token_ids) if x.embeds is None else x.embeds
        return self.project_in(h).add_(self.positions(self.rows_of_positions(x.positions)))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden if self.project_out is None else self.project_out(hidden))
