"""Pre-norm decoder blocks shared by families. A model plugin subclasses what is peculiar to it."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from lmkit.api import BuildContext, LinearSpec, ModelInfo, PluginError, StepInputs
from lmkit.layers.activations import activation
from lmkit.layers.describe import DecoderConfig, decoder_config
from lmkit.layers.linear import Linear
from lmkit.layers.norm import RMSNorm

Angles = tuple[Tensor, Tensor]


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions: hidden [T, D] -> [T, D]."""

    def __init__(self, cfg: DecoderConfig, layer: int, specs: dict[str, LinearSpec], ctx: BuildContext) -> None:
        super().__init__()
        if cfg.num_kv_heads % ctx.tp_size:
            raise PluginError(f"{cfg.num_kv_heads} key-value heads cannot be split over {ctx.tp_size} ranks")
        self.num_q, self.num_kv = cfg.num_q_heads // ctx.tp_size, cfg.num_kv_heads // ctx.tp_size
        self.head_dim = cfg.head_dim
        self.qkv = ctx.linear(specs[f"layers.{layer}.attn.qkv"])
        self.o = ctx.linear(specs[f"layers.{layer}.attn.o"])
        self.attn = ctx.attention(layer, scale=cfg.head_dim**-0.5)
        self.rows = ctx.rows

    def forward(self, h: Tensor, angles: Angles, x: StepInputs) -> Tensor:
        qkv = self.qkv(h).view(h.shape[0], -1, self.head_dim)
        qk, v = qkv.split((self.num_q + self.num_kv, self.num_kv), dim=1)
        self.turn(qk, angles)
        q, k = qk.split((self.num_q, self.num_kv), dim=1)
        return self.o(self.attn(q, k, v, x))

    def turn(self, qk: Tensor, angles: Angles) -> None:
        """Makes queries and keys [T, Hq + Hkv, D] in place what they are when they enter attention."""
        self.rows.rotate(qk, *angles)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, cfg: DecoderConfig, layer: int, specs: dict[str, LinearSpec], ctx: BuildContext) -> None:
        super().__init__()
        self.gate_up = ctx.linear(specs[f"layers.{layer}.mlp.gate_up"])
        self.down = ctx.linear(specs[f"layers.{layer}.mlp.down"])
        activation(cfg.activation)  # an unknown one is refused here
        self.act, self.rows = cfg.activation, ctx.rows

    def forward(self, h: Tensor) -> Tensor:
        return self.down(self.rows.gate(self.gate_up(h), self.act))


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm and around the residual stream `h` [T, D].

    What a block computes is added to `h` by the norm that comes next, in one operator: a layer takes the `delta` that
    the layer before left (None: nothing) and returns its own.
    """

    attention: type[SelfAttention] = SelfAttention
    feed_forward: type[GatedMLP] = GatedMLP

    def __init__(self, cfg: DecoderConfig, layer: int, specs: dict[str, LinearSpec], ctx: BuildContext) -> None:
        super().__init__()
        self.attn_norm = cast("RMSNorm", ctx.norm(cfg.hidden_size, cfg.norm_eps))
        self.attn = self.attention(cfg, layer, specs, ctx)
        self.mlp_norm = cast("RMSNorm", ctx.norm(cfg.hidden_size, cfg.norm_eps))
        self.mlp = self.feed_forward(cfg, layer, specs, ctx)

    def forward(self, h: Tensor, delta: Tensor | None, angles: Angles, x: StepInputs) -> Tensor:
        delta = self.attn(self.attn_norm.add(h, delta), angles, x)
        return self.mlp(self.mlp_norm.add(h, delta))


class Decoder(nn.Module):
    """Embedding, layers, final norm, head: a complete Model."""

    layer: type[DecoderLayer] = DecoderLayer
    lm_head: Linear

    def __init__(self, info: ModelInfo, ctx: BuildContext) -> None:
        super().__init__()
        cfg = decoder_config(info)
        specs = {spec.name: spec for spec in info.linears}
        self.embed = ctx.embedding(cfg.vocab_size, cfg.hidden_size)
        self.rotary = ctx.rotary(cfg.head_dim, cfg.rope)
        self.layers = nn.ModuleList(self.layer(cfg, i, specs, ctx) for i in range(len(cfg.windows)))
        self.norm = cast("RMSNorm", ctx.norm(cfg.hidden_size, cfg.norm_eps))
        head = specs.get("lm_head") or LinearSpec("lm_head", cfg.hidden_size, (cfg.vocab_size,))
        self.lm_head = cast("Linear", ctx.linear(head))
        if info.tie_embeddings:
            self.lm_head.tie(self.embed)

    @torch.inference_mode()
    def forward(self, x: StepInputs) -> Tensor:
        h = self.embed(x.token_ids) if x.embeds is None else x.embeds.clone()
        angles, delta = self.rotary(x.positions), None
        for layer in self.layers:
            delta = layer(h, delta, angles, x)
        return self.norm.add(h, delta)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)
