"""Zamba 2: blocks of attention and MLP, and the layers that use them."""

from __future__ import annotations

from typing import Any, cast

import torch
from lmkit.api import ModelInfo, StepInputs
from lmkit_decoders import Decoder, Mamba2
from lmkit_decoders.decoder import Angles
from lmkit_layers import Norm
from torch import Tensor, nn


class Block(nn.Module):
    """What uses share: hidden states beside embeddings [T, 2 * D] -> [T, D], without residual streams."""

    def __init__(self, cfg: Any, path: str, specs: Any, ctx: Any) -> None:
        super().__init__()
        self.heads, self.head_dim, self.act, self.rows = cfg.num_q_heads, cfg.head_dim, cfg.activation, ctx.rows
        self.kv_heads = cfg.num_kv_heads
        self.qkv, self.o, self.gate_up, self.down = (
            ctx.linear(specs[f"{path}.{name}"]) for name in ("qkv", "o", "gate_up", "down")
        )
        self.attn_norm = cast("Norm", ctx.norm(2 * cfg.hidden_size, cfg.norm_eps))
        self.mlp_norm = cast("Norm", ctx.norm(cfg.hidden_size, cfg.norm_eps))

    def forward(self, both: Tensor, use: Use, angles: Angles | None, x: StepInputs) -> Tensor:
        both = self.attn_norm(both)
        qkv = use.add_qkv(self.qkv(both), both).unflatten(1, (-1, self.head_dim))
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        if angles is not None:
            self.rows.rotate(qk, *angles, False)
        q, k = qk.split((self.heads, self.kv_heads), dim=1)
        h = self.mlp_norm(self.o(use.attn(q, k, v, x)))
        return self.down(self.rows.gate(self.gate_up(h) + use.mlp_out(use.mlp_in(h)), self.act))


class Use(nn.Module):
    """One use of a block, in `layer`: its attention over the layer's own keys and values, and its adapters."""

    def __init__(self, cfg: Any, path: str, layer: int, specs: Any, ctx: Any) -> None:
        super().__init__()
        self.attn = ctx.attention(layer, scale=cfg.attn_scale)
        self.out, self.mlp_in, self.mlp_out = (
            ctx.linear(specs[f"{path}.{name}"]) for name in ("out", "mlp_in", "mlp_out")
        )
        self.qkv_in = None
        if f"{path}.qkv_in" in specs:
            names = ("qkv_in", "q_out", "k_out", "v_out")
            self.qkv_in, self.q_out, self.k_out, self.v_out = (ctx.linear(specs[f"{path}.{name}"]) for name in names)

    def add_qkv(self, qkv: Tensor, both: Tensor) -> Tensor:
        if self.qkv_in is None:
            return qkv
        low = self.qkv_in(both).chunk(3, dim=1)
        outs = (self.q_out, self.k_out, self.v_out)
        return qkv + torch.cat([out(each.contiguous()) for out, each in zip(outs, low, strict=True)], dim=1)


class ZambaModel(Decoder):
    mixer = Mamba2

    def __init__(self, info: ModelInfo, ctx: Any) -> None:
        super().__init__(info, ctx)
        given: Any = info.config["options"]
        specs = {spec.name: spec for spec in info.linears}
        self.blocks = nn.ModuleList(Block(self.cfg, f"blocks.{n}", specs, ctx) for n in range(given["blocks"]))
        self.uses = nn.ModuleList(Use(self.cfg, f"uses.{n}", i, specs, ctx) for n, i in enumerate(given["uses"]))
        self.use_of = {layer: n for n, layer in enumerate(given["uses"])}

    @torch.inference_mode()
    def forward(self, x: StepInputs) -> Tensor:
        h = self.embeddings(x)
        first = h.clone()
        angles = next((rotary(x.positions) for rotary in self.rotary), None)
        for i, layer in enumerate(self.layers):
            read = h
            if (n := self.use_of.get(i)) is not None:
                use = cast("Use", self.uses[n])
                block = self.blocks[n % len(self.blocks)]
                read = h + use.out(block(torch.cat((h, first), dim=1), use, angles, x))
            h = h + layer.finish(*layer.mix(read, None, None, x))
        return self.norm(h)
