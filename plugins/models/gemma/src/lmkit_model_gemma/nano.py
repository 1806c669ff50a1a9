"""Gemma 3n (text): streams that are predicted and corrected around each layer, of which one is computed."""

from __future__ import annotations

from typing import Any

import torch
from lmkit.api import CannotSplit, StepInputs
from lmkit_decoders import Decoder, GatedMLP
from lmkit_decoders.decoder import Angles, DecoderLayer, SandwichLayer
from torch import Tensor, nn

from lmkit_model_gemma.per_layer import PerLayerBlock, PerLayerInputs, ValueNormAttention
from lmkit_model_gemma.small_config import SmallGemmaConfig


class SparseMLP(GatedMLP):
    """Only gates far above their mean are open (https://arxiv.org/abs/2506.06644): by `cutoff` standard deviations."""

    cutoff: float

    def forward(self, h: Tensor) -> Tensor:
        gate, up = self.gate_up(h).chunk(2, dim=-1)
        floor = gate.mean(-1, keepdim=True) + gate.std(-1, keepdim=True, unbiased=False) * self.cutoff
        return self.down(self.rows.activate((gate - floor).relu(), self.act) * up)


class Laurel(nn.Module):
    """h + norm(right(left(h)))."""

    def __init__(self, cfg: Any, layer: int, specs: Any, ctx: Any) -> None:
        super().__init__()
        self.left, self.right = (ctx.linear(specs[f"layers.{layer}.laurel.{name}"]) for name in ("left", "right"))
        self.norm = ctx.norm(cfg.hidden_size, cfg.norm_eps, cfg.norm)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.norm(self.right(self.left(h)))


class AltUp(nn.Module):
    """Streams [N, T, D] before a layer are predicted from each other, and corrected by what the layer computed."""

    router: nn.Linear
    prediction: nn.Linear
    correction: nn.Linear

    def __init__(self, cfg: Any, ctx: Any) -> None:
        super().__init__()
        options = ctx.info.config["options"]
        num, d = options["streams"], cfg.hidden_size
        self.num, self.active, self.scaled = num, options["active"], options["scaled"]
        self.router_norm = ctx.norm(d, cfg.norm_eps, cfg.norm)
        for name, size, out in (("router", d, num), ("prediction", num, num * num), ("correction", num, num)):
            setattr(self, name, nn.Linear(size, out, bias=False, dtype=ctx.dtype).requires_grad_(False))
        self.correct_output_scale = nn.Parameter(torch.empty(d, dtype=ctx.dtype), requires_grad=False)

    def modalities(self, h: Tensor) -> Tensor:
        """[T, D] -> [T, N]."""
        return torch.tanh(self.router(self.router_norm(h) / h.shape[-1]).float()).to(h.dtype)

    def predict(self, streams: Tensor) -> Tensor:
        shares = self.prediction(self.modalities(streams[self.active])).unflatten(1, (self.num, self.num))
        return streams + torch.einsum("ntd,tmn->mtd", streams, shares)

    def correct(self, predicted: Tensor, h: Tensor) -> Tensor:
        shares = self.correction(self.modalities(h)) + 1
        return predicted + (h - predicted[self.active]) * shares.T[..., None]

    def output(self, streams: Tensor) -> Tensor:
        """The stream that was computed, scaled: [T, D]."""
        h = streams[self.active]
        return h * self.correct_output_scale if self.scaled else h


class Gemma3nLayer(SandwichLayer):
    """Streams [N, T, D] -> [N, T, D]; `vectors` [T, P] are this layer's."""

    def __init__(self, cfg: Any, i: int, attn: nn.Module, mlp: nn.Module, specs: Any, ctx: Any) -> None:
        super().__init__(cfg, attn, mlp, ctx)
        self.altup, self.laurel = AltUp(cfg, ctx), Laurel(cfg, i, specs, ctx)
        self.per_layer = PerLayerBlock(cfg, i, specs, ctx)

    def run(self, streams: Tensor, vectors: Tensor, angles: Angles | None, x: StepInputs) -> Tensor:
        predicted = self.altup.predict(streams)
        h = predicted[self.altup.active]
        y = self.attn_norm(h)
        h = h + self.attn_post_norm(self.attn(y, angles, x))
        h = (h + self.laurel(y)) * 2**-0.5
        h = h + self.mlp_post_norm(self.mlp(self.mlp_norm(h)))
        streams = self.altup.correct(predicted, h)
        streams[1:] += self.per_layer(self.altup.output(streams), vectors)
        return streams


class Gemma3n(Decoder):
    config = SmallGemmaConfig
    attention = ValueNormAttention

    def __init__(self, info: Any, ctx: Any) -> None:
        super().__init__(info, ctx)
        specs = {spec.name: spec for spec in info.linears}
        self.per_layer = PerLayerInputs(self.cfg, specs, ctx)
        others = range(info.config["options"]["streams"] - 1)
        self.altup_in, self.altup_out = (
            nn.ModuleList(ctx.linear(specs[f"{name}.{n}"]) for n in others) for name in ("altup_in", "altup_out")
        )

    def make_layer(self, i: int, specs: Any, ctx: Any) -> DecoderLayer:
        cfg, cutoff = self.cfg.at(i), ctx.info.config["options"]["cutoffs"][i]
        mlp = self.make_mlp(i, specs, ctx)
        if cutoff is not None:
            if ctx.tp_size > 1:
                raise CannotSplit(f"sparse activations cannot be split over {ctx.tp_size} ranks")
            mlp = SparseMLP(cfg, f"layers.{i}.mlp", specs, ctx)
            mlp.cutoff = cutoff
        return Gemma3nLayer(cfg, i, self.make_attention(i, specs, ctx), mlp, specs, ctx)

    @torch.inference_mode()
    def forward(self, x: StepInputs) -> Tensor:
        h = self.embeddings(x)
        vectors = self.per_layer(x.token_ids, h)
        angles = [rotary(x.positions) for rotary in self.rotary]
        streams = torch.stack([h, *(as_large(linear(h), h) for linear in self.altup_in)])
        for i, (layer, by) in enumerate(zip(self.layers, self.turned_by, strict=True)):
            streams = layer.run(streams, vectors[:, i], None if by is None else angles[by], x)
        first = streams[0]
        others = (as_large(linear(s), first) for linear, s in zip(self.altup_out, streams[1:], strict=True))
        return self.norm(torch.stack([first, *others]).mean(0))


def as_large(h: Tensor, like: Tensor) -> Tensor:
    """`h` [T, D] scaled to the root mean square of `like`."""
    wanted, found = (t.square().mean(-1, keepdim=True) for t in (like, h))
    return h * wanted.sqrt() / found.clamp(min=1e-5).sqrt()
