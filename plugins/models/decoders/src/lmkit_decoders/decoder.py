"""Decoder blocks shared by families, built from a DecoderConfig. A model plugin subclasses what is peculiar to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import torch
from lmkit.api import BuildContext, CannotSplit, Collectives, ConfigError, LinearSpec, ModelInfo, StepInputs
from lmkit_layers.attention import grow
from lmkit_layers.linear import Linear
from lmkit_layers.norm import Norm, norm_over_ranks
from torch import Tensor, nn

from lmkit_decoders.describe import DecoderConfig, decoder_config
from lmkit_decoders.mla import LatentAttention
from lmkit_decoders.mlp import MLP, GatedMLP, Specs
from lmkit_decoders.moe import MoE

Angles = tuple[Tensor, Tensor]


class HeadNorm(nn.Module):
    """A layer norm of each head with weights of its own and no bias: [T, H, D] in place.

    Every rank has the weights of all `heads`; its own begin at `first`.
    """

    ones: Tensor
    parts: dict[str, tuple[str, ...]]  # the weight may be stored head by head

    def __init__(self, heads: int, head_dim: int, eps: float, ctx: BuildContext, first: int = 0) -> None:
        super().__init__()
        self.first = first
        self.weight = nn.Parameter(torch.empty(heads, head_dim, dtype=ctx.dtype), requires_grad=False)
        self.parts = {"weight": tuple(str(head) for head in range(heads))}
        self.register_buffer("ones", torch.ones(head_dim, dtype=ctx.dtype, device="cpu"), persistent=False)
        self.eps, self.rows = eps, ctx.rows

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        weight = self.weight[self.first : self.first + x.shape[1]]
        return torch.mul(self.rows.layer_norm(x, self.ones, None, self.eps), weight, out=out)


class SelfAttention(nn.Module):
    """Grouped-query attention: hidden [T, D] -> [T, D]; turned by `angles` unless None."""

    def __init__(self, cfg: DecoderConfig, layer: int, specs: Specs, ctx: BuildContext) -> None:
        super().__init__()
        shared = ctx.tp_size > cfg.num_kv_heads  # by several ranks each
        more, fewer = sorted((ctx.tp_size, cfg.num_kv_heads), reverse=True)
        if cfg.num_q_heads % ctx.tp_size or more % fewer:
            heads = f"{cfg.num_q_heads} query and {cfg.num_kv_heads} key-value heads"
            raise CannotSplit(f"{heads} cannot be split over {ctx.tp_size} ranks")
        self.num_all, self.ranks = (cfg.num_q_heads, cfg.num_kv_heads), ctx.collectives
        self.num_q = cfg.num_q_heads // ctx.tp_size
        self.num_kv = max(1, cfg.num_kv_heads // ctx.tp_size)
        self.head_dim, self.interleaved, self.clip = cfg.head_dim, cfg.interleaved, cfg.qkv_clip
        self.growth = cfg.query_growth
        qkv = specs[f"layers.{layer}.attn.qkv"]
        self.qkv = ctx.linear(qkv, self.share(qkv, ctx.tp_size)) if shared else ctx.linear(qkv)
        self.o = ctx.linear(specs[f"layers.{layer}.attn.o"])
        self.attn = ctx.attention(layer, scale=cfg.attn_scale or cfg.head_dim**-0.5)
        self.rows = ctx.rows
        self.whole, self.norm_last = cfg.qk_norm == "whole", cfg.qk_norm_last
        usual = all(getattr(type(self), n) is getattr(SelfAttention, n) for n in ("heads", "prepare", "rotate"))
        nothing_after = usual and self.growth is None and not self.norm_last  # is done to heads that were turned
        self.turned_late = nothing_after and self.attn.rotates
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if cfg.qk_norm == "each":
            self.q_norm, self.k_norm = (
                HeadNorm(num, cfg.head_dim, cfg.norm_eps, ctx, ctx.tp_rank * num // ctx.tp_size) for num in self.num_all
            )
        elif cfg.qk_norm:
            q, k = self.num_all if self.whole else (1, 1)
            self.q_norm = cast("Norm", ctx.norm(q * cfg.head_dim, cfg.norm_eps, cfg.norm))
            self.k_norm = cast("Norm", ctx.norm(k * cfg.head_dim, cfg.norm_eps, cfg.norm))

    def forward(self, h: Tensor, angles: Angles | None, x: StepInputs) -> Tensor:
        if angles is not None and self.turned_late:
            q, k, v = self.heads(h, None, x)
            return self.output(self.attn(q, k, v, x, (*angles, self.interleaved)), h)
        q, k, v = self.heads(h, angles, x)
        return self.output(self.attn(q, k, v, x), h)

    def share(self, qkv: LinearSpec, num_ranks: int) -> LinearSpec:
        """One rank's part: of its queries, and of the one head of keys and values that they read."""
        q, *kv = qkv.out_features
        if len(kv) != 2 or any(n != kv[0] for n in kv):
            raise CannotSplit(f"{qkv.name}: parts {qkv.parts} cannot be split over {num_ranks} ranks")
        return replace(qkv, out_features=(q // num_ranks, self.num_kv * self.head_dim, self.num_kv * self.head_dim))

    def heads(self, h: Tensor, angles: Angles | None, x: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, Hq, D], keys and values [T, Hkv, D] as they enter attention."""
        return self.prepare(self.qkv(h).view(h.shape[0], -1, self.head_dim), angles, x)

    def prepare(self, qkv: Tensor, angles: Angles | None, x: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
        """The same from [T, Hq + 2 * Hkv, D] as it was projected."""
        qk, v = qkv.split((self.num_q + self.num_kv, self.num_kv), dim=1)
        if not self.norm_last:
            self.norm_heads(qk)
        if self.clip is not None:
            qkv.clamp_(-self.clip, self.clip)
        if angles is not None:
            self.rotate(qk, angles)
        if self.norm_last:
            self.norm_heads(qk)
        q, k = qk.split((self.num_q, self.num_kv), dim=1)
        if self.growth is not None:
            grow(q, x.positions, *self.growth)
        return q, k, v

    def output(self, y: Tensor, h: Tensor) -> Tensor:
        """What attention gave for `h` [T, Hq * D] -> [T, hidden]."""
        return self.o(y)

    def rotate(self, qk: Tensor, angles: Angles) -> None:
        """Turns queries and keys [T, Hq + Hkv, D] in place."""
        self.rows.rotate(qk, *angles, self.interleaved)

    def norm_heads(self, qk: Tensor) -> None:
        parts = qk.split((self.num_q, self.num_kv), dim=1)
        for norm, heads, num in zip((self.q_norm, self.k_norm), parts, self.num_all, strict=True):
            if norm is not None and self.whole:
                norm_over_ranks(norm, heads, num, self.ranks)
            elif norm is not None:
                norm(heads, out=heads)


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm and around the residual stream `h` [T, D].

    What a block computes is added to `h` by the norm that comes next, in one operator: a layer takes the `delta` that
    the layer before left (None: nothing) and returns its own. In `mix` tokens read each other, in `finish` each is by
    itself: after the last layer's `mix` tokens that nobody reads are dropped.
    """

    norms: tuple[str, ...] = ("attn_norm", "mlp_norm")
    attn_norm: Norm
    mlp_norm: Norm

    def __init__(self, cfg: DecoderConfig, attn: nn.Module, mlp: nn.Module, ctx: BuildContext) -> None:
        super().__init__()
        self.attn, self.mlp = attn, mlp
        self.residual_scale = cfg.residual_scale
        for name in self.norms:
            setattr(self, name, ctx.norm(cfg.hidden_size, cfg.norm_eps, cfg.norm))

    def mix(self, h: Tensor, delta: Tensor | None, angles: Angles | None, x: StepInputs) -> tuple[Tensor, ...]:
        """`h` with `delta` in it, and what else `finish` takes: all [T, ...]."""
        return h, self.attn(self.attn_norm.add(h, delta), angles, x)

    def finish(self, h: Tensor, mixed: Tensor) -> Tensor:
        return self.scaled(self.mlp(self.mlp_norm.add(h, self.scaled(mixed))))

    def scaled(self, delta: Tensor) -> Tensor:
        return delta if self.residual_scale == 1.0 else delta * self.residual_scale


class SandwichLayer(DecoderLayer):
    """Norms before and after each block."""

    norms = ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")
    attn_post_norm: Norm
    mlp_post_norm: Norm

    def finish(self, h: Tensor, mixed: Tensor) -> Tensor:
        delta = self.scaled(self.attn_post_norm(mixed))
        return self.scaled(self.mlp_post_norm(self.mlp(self.mlp_norm.add(h, delta))))


class PostNormLayer(DecoderLayer):
    """Blocks read the residual stream as it is; what they add to it is normed."""

    norms = ("attn_post_norm", "mlp_post_norm")
    attn_post_norm: Norm
    mlp_post_norm: Norm

    def mix(self, h: Tensor, delta: Tensor | None, angles: Angles | None, x: StepInputs) -> tuple[Tensor, ...]:
        if delta is not None:
            h.add_(delta)
        return h, self.attn(h, angles, x)

    def finish(self, h: Tensor, mixed: Tensor) -> Tensor:
        h.add_(self.attn_post_norm(mixed))
        return self.mlp_post_norm(self.mlp(h))


class LoneLayer(DecoderLayer):
    """No MLP."""

    norms = ("attn_norm",)

    def finish(self, h: Tensor, mixed: Tensor) -> Tensor:
        return self.scaled(mixed)


class ParallelLayer(DecoderLayer):
    """Attention and MLP read the same norm of the residual stream."""

    norms = ("attn_norm",)

    def mix(self, h: Tensor, delta: Tensor | None, angles: Angles | None, x: StepInputs) -> tuple[Tensor, ...]:
        y = self.attn_norm.add(h, delta)
        return h, self.attn(y, angles, x), y

    def finish(self, h: Tensor, mixed: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return mixed.add_(self.mlp(y))


class TwoNormParallelLayer(DecoderLayer):
    """Attention and MLP read the residual stream, each through its own norm."""

    def finish(self, h: Tensor, mixed: Tensor) -> Tensor:
        return mixed.add_(self.mlp(self.mlp_norm(h)))


LAYERS: dict[str, type[DecoderLayer]] = {
    "pre": DecoderLayer,
    "post": PostNormLayer,
    "sandwich": SandwichLayer,
    "alone": LoneLayer,
    "parallel": ParallelLayer,
    "parallel_two_norms": TwoNormParallelLayer,
}


class Decoder(nn.Module):
    """Embedding, layers, final norm, head: a complete Model. A family replaces what is peculiar to it.

    Classes of blocks are attributes; `make_layer`, `make_attention`, `make_mlp` and `rows_of_positions` are methods.
    `taps`: layers whose inputs follow the hidden states in what `forward` gives: [T, (1 + taps) * D], for a draft.
    """

    taps: tuple[int, ...] = ()

    config: type[DecoderConfig] = DecoderConfig
    attention: type[SelfAttention] = SelfAttention
    mixer: type[nn.Module] = SelfAttention  # where it is instead of attention: built and called like that
    gated_mlp: type[GatedMLP] = GatedMLP
    plain_mlp: type[MLP] = MLP
    moe: type[MoE] = MoE
    lm_head: Linear

    def __init__(self, info: ModelInfo, ctx: BuildContext) -> None:
        super().__init__()
        self.cfg = cfg = decoder_config(info, self.config)
        specs = {spec.name: spec for spec in info.linears}
        self.embed = ctx.embedding(cfg.vocab_size, cfg.hidden_size)
        self.embed_scale = float(torch.tensor(cfg.embed_scale, dtype=ctx.dtype, device="cpu"))
        self.positions = ctx.embedding(cfg.num_positions, cfg.hidden_size) if cfg.num_positions else None
        self.embed_norm = ctx.norm(cfg.hidden_size, cfg.norm_eps, cfg.norm) if cfg.embed_norm else None
        ropes = [rope for rope in (cfg.rope, cfg.window_rope) if rope is not None]
        self.turned_by = [self._rotary(i) for i in range(len(cfg.windows))]
        sizes = {by: cfg.at(i).rotary_dim for i, by in enumerate(self.turned_by)}
        self.rotary = nn.ModuleList(ctx.rotary(sizes.get(n, cfg.rotary_dim), rope) for n, rope in enumerate(ropes))
        self.layers = nn.ModuleList(self.make_layer(i, specs, ctx) for i in range(len(cfg.windows)))
        self.norm = cast("Norm", ctx.norm(cfg.hidden_size, cfg.norm_eps, cfg.norm))
        self.lm_head = cast("Linear", ctx.linear(specs.get("lm_head") or cfg.head()))
        if info.tie_embeddings:
            self.lm_head.tie(self.embed)
        self.dtype, self.own = ctx.dtype, range(len(self.layers))
        self.stages: Collectives | None = None  # ranks that have other layers, if there are any

    def keep(self, layers: range, stages: Collectives) -> None:
        """Only these layers, and what stands before the first of all and behind the last: others are those of other
        ranks, to which hidden states go on."""
        if type(self).forward is not Decoder.forward:
            raise ConfigError(f"layers of {type(self).__name__} cannot be split over ranks", fix="--pp 1")
        last = layers.stop == len(self.layers)
        for i in self.own:
            if i not in layers:
                self.layers[i] = nn.Identity()
        if layers.start > 0:
            self.positions = self.embed_norm = None
            if not (last and self.lm_head.tied):
                self.embed = nn.Identity()
        if not last:
            for name in ("norm", "lm_head"):
                setattr(self, name, nn.Identity())
        self.own, self.stages = layers, stages

    def _rotary(self, layer: int) -> int | None:
        """Which of the rotaries turns `layer`."""
        if self.cfg.rope is None or layer in self.cfg.unturned:
            return None
        return 1 if self.cfg.window_rope is not None and self.cfg.windows[layer] is not None else 0

    def make_layer(self, i: int, specs: Specs, ctx: BuildContext) -> DecoderLayer:
        attn = self.make_attention(i, specs, ctx)
        mlp = self.make_mlp(i, specs, ctx) if self.cfg.has_mlp(i) else nn.Identity()
        return LAYERS[self.cfg.wiring](self.cfg, attn, mlp, ctx)

    def make_attention(self, i: int, specs: Specs, ctx: BuildContext) -> nn.Module:
        kind: type[nn.Module] = LatentAttention if self.cfg.mla else self.attention
        if not self.cfg.attends(i):
            kind = self.mixer
        return kind(self.cfg.at(i), i, specs, ctx)

    def make_mlp(self, i: int, specs: Specs, ctx: BuildContext) -> nn.Module:
        kind: type[nn.Module] = self.gated_mlp if self.cfg.gated else self.plain_mlp
        if self.cfg.sparse(i):
            kind = self.moe
        return kind(self.cfg.at(i), f"layers.{i}.mlp", specs, ctx)

    def embeddings(self, x: StepInputs) -> Tensor:
        """What enters the first layer: [T, D], the caller's own."""
        h = self.embed(x.token_ids) if x.embeds is None else x.embeds.clone()
        if self.embed_scale != 1.0:
            h.mul_(self.embed_scale)
        if self.positions is not None:
            h.add_(self.positions(self.rows_of_positions(x.positions)))
        return h if self.embed_norm is None else self.embed_norm(h)

    def rows_of_positions(self, positions: Tensor) -> Tensor:
        """Which rows of the table of learned positions those of `positions` [T] are."""
        return positions

    @torch.inference_mode()
    def forward(self, x: StepInputs) -> Tensor:
        h = self.embeddings(x) if self.own.start == 0 else self._received(x)
        angles, delta = [rotary(x.positions) for rotary in self.rotary], None
        tapped: dict[int, Tensor] = {}
        for i in self.own:
            layer, by = cast("DecoderLayer", self.layers[i]), self.turned_by[i]
            if i in self.taps:
                tapped[i] = h.clone() if delta is None else h + delta
            mixed = layer.mix(h, delta, None if by is None else angles[by], x)
            h, *rest = self.read(i, x, *mixed)
            delta = layer.finish(h, *rest)
        if self.stages is not None and self.own.stop < len(self.layers):
            h = h if delta is None else h.add_(delta)
            self.stages.send(h, self.stages.rank + 1)
            return h
        hidden = self.norm.add(h, delta)
        if not self.taps:
            return hidden
        read = slice(None) if len(hidden) == len(x.token_ids) else x.logits_rows
        return torch.cat((hidden, *(tapped[i][read] for i in self.taps)), -1)

    def _received(self, x: StepInputs) -> Tensor:
        """What the rank before this one computed: [T, D]."""
        assert self.stages is not None
        h = torch.empty((len(x.token_ids), self.cfg.hidden_size), dtype=self.dtype, device=x.token_ids.device)
        return self.stages.receive(h, self.stages.rank - 1)

    def read(self, layer: int, x: StepInputs, *tensors: Tensor) -> Iterable[Tensor]:
        """`tensors` [T, ...] after `layer` has mixed its tokens: after the last, of those that are read."""
        if x.only_logits and layer == len(self.layers) - 1:
            return [tensor[x.logits_rows] for tensor in tensors]
        return tensors

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.lm_head(hidden[:, : self.cfg.hidden_size] if self.taps else hidden)
        if self.cfg.logit_scale != 1.0:
            logits = logits * self.cfg.logit_scale
        if self.cfg.logit_softcap is not None:
            logits = torch.tanh(logits / self.cfg.logit_softcap) * self.cfg.logit_softcap
        return logits
