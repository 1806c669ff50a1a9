"""What is peculiar to Qwen: Qwen2 is the plain decoder (with biases on q, k, v); Qwen3 norms query and key heads."""

from __future__ import annotations

from lmkit.api import BuildContext, LinearSpec
from lmkit.layers import Decoder, DecoderConfig, DecoderLayer, SelfAttention
from torch import Tensor


class Qwen2(Decoder):
    """The shared decoder as it is."""


class Qwen3Attention(SelfAttention):
    """RMS norm over each query and key head, before the rotation."""

    def __init__(self, cfg: DecoderConfig, layer: int, specs: dict[str, LinearSpec], ctx: BuildContext) -> None:
        super().__init__(cfg, layer, specs, ctx)
        self.q_norm = ctx.norm(cfg.head_dim, cfg.norm_eps)
        self.k_norm = ctx.norm(cfg.head_dim, cfg.norm_eps)

    def turn(self, qk: Tensor, angles: tuple[Tensor, Tensor]) -> None:
        q, k = qk.split((self.num_q, self.num_kv), dim=1)
        self.q_norm(q, out=q)
        self.k_norm(k, out=k)
        super().turn(qk, angles)


class Qwen3Layer(DecoderLayer):
    attention = Qwen3Attention


class Qwen3(Decoder):
    layer = Qwen3Layer
