"""EAGLE heads as modules."""

from __future__ import annotations

from typing import Any, cast

import torch
from lmkit.api import BuildContext, ModelInfo, StepInputs
from lmkit_decoders import Decoder, DecoderLayer, HeadDecoder, Sum
from lmkit_layers import Linear, Norm
from torch import Tensor, nn

from lmkit_proposer_eagle.arch import TAPS, EagleConfig


class EagleHead(HeadDecoder):
    """EAGLE-1. Its hidden states stand for the model's after the last norm."""

    config = EagleConfig

    def __init__(self, info: ModelInfo, ctx: BuildContext) -> None:
        super().__init__(info, ctx)
        self.norm = Sum(info.hidden_size, ctx)
        cast("DecoderLayer", self.layers[0]).attn_norm = Sum(info.hidden_size, ctx)


class WideLayer(DecoderLayer):
    """Attention reads embeddings and hidden states side by side, each normed: [T, 2 * D]. It adds to the latter."""

    norms = ("embed_norm", "attn_norm", "mlp_norm")
    embed_norm: Norm
    normed = False  # see EagleConfig

    def mix(self, h: Tensor, delta: Tensor | None, angles: Any, x: StepInputs) -> tuple[Tensor, ...]:
        embedded, hidden = (part.contiguous() for part in h.chunk(2, -1))
        normed = self.attn_norm(hidden)
        read = torch.cat((self.embed_norm(embedded), normed), -1)
        return normed if self.normed else hidden, self.attn(read, angles, x)


class Eagle3Head(HeadDecoder):
    """EAGLE-3. Its hidden states are those before its last norm; first they are made of the model's at three layers."""

    config = EagleConfig
    cfg: EagleConfig
    optional = ("d2t",)  # where its tokens are the model's

    def __init__(self, info: ModelInfo, ctx: BuildContext) -> None:
        super().__init__(info, ctx)
        self.last_norm = cast("Norm", ctx.norm(info.hidden_size, self.cfg.norm_eps, self.cfg.norm))
        self.norm = Sum(info.hidden_size, ctx)
        self.lm_head = cast("Linear", ctx.linear(self.cfg.head()))
        self.d2t = nn.Parameter(torch.empty(self.cfg.num_tokens, dtype=torch.int64), requires_grad=False)

    def make_layer(self, i: int, specs: Any, ctx: BuildContext) -> DecoderLayer:
        layer = WideLayer(self.cfg, self.make_attention(i, specs, ctx), self.make_mlp(i, specs, ctx), ctx)
        layer.normed = self.cfg.normed
        return layer

    def share(self, model: Decoder) -> None:
        super().share(model)
        model.taps = self.cfg.taps

    @torch.inference_mode()
    def enter(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """[T, 2 * D], of hidden states of the model and its layers [T, 4 * D], or of the head itself [T, D]."""
        size = self.cfg.hidden_size
        if hidden.shape[-1] == (1 + TAPS) * size:
            hidden = self.fc(hidden[:, size:])
        return torch.cat((self.model.embed(token_ids), hidden), -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the tokens that the head knows: `known` says which these are."""
        return self.lm_head(self.last_norm(hidden))

    def known(self, ids: Tensor) -> Tensor:
        """The model's ids of the head's: the file has the differences."""
        return ids if self.d2t is None else ids + self.d2t[ids]


def eagle_head(info: ModelInfo, ctx: BuildContext) -> HeadDecoder:
    return (Eagle3Head if info.config["version"] == 3 else EagleHead)(info, ctx)
