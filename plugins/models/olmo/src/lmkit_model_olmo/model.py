"""OLMo Hybrid: norms stand before gated delta nets and their MLPs, but after attention and its."""

from __future__ import annotations

from typing import Any

from lmkit_decoders import Decoder, DecoderLayer, GatedDeltaNet
from lmkit_decoders.decoder import PostNormLayer
from lmkit_layers import Norm


class AttentionLayer(PostNormLayer):
    """Its first norm is called like the one that stands between the blocks of the other layers."""

    norms = ("mlp_norm", "mlp_post_norm")

    @property
    def attn_post_norm(self) -> Norm:  # type: ignore[override]
        return self.mlp_norm


class OlmoHybrid(Decoder):
    mixer = GatedDeltaNet

    def make_layer(self, i: int, specs: Any, ctx: Any) -> DecoderLayer:
        kind = DecoderLayer if self.cfg.mixes(i) else AttentionLayer
        return kind(self.cfg, self.make_attention(i, specs, ctx), self.make_mlp(i, specs, ctx), ctx)
