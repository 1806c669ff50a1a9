"""Mixtures of experts: a router that chooses some experts for each token, and the experts, stacked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmkit.api import BuildContext, DeviceInfo, ExpertKernel, LinearSpec, PluginError, QuantFormat, RowOps
from lmkit.layers.describe import DecoderConfig, MoEConfig
from lmkit.layers.linear import Linear
from lmkit.layers.mlp import GatedMLP, Specs


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """[experts, out, in] in the dtype of the activations."""

    weight: Tensor

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


class ReferenceExperts:
    """Tokens sorted by expert, one matrix product for each expert that has any: in torch, over dequantized weights."""

    name = "moe_reference"

    def can_run(self, fmt: QuantFormat, layer: LinearSpec, device: DeviceInfo) -> str | None:
        return None

    def pack(self, fmt: QuantFormat, params: dict[str, Tensor], layer: LinearSpec, dtype: torch.dtype) -> StackedWeight:
        weight = fmt.dequantize(params, dtype)
        params.clear()
        return StackedWeight(weight.view(layer.experts, -1, layer.in_features))

    def apply(
        self, x: Tensor, ids: Tensor, weights: Tensor, up: Linear, down: Linear, act: str, rows: RowOps
    ) -> Tensor:
        order = ids.flatten().argsort(stable=True)  # (token, choice) pairs, by expert
        tokens = order // ids.shape[1]
        ends = torch.bincount(ids.flatten(), minlength=up.spec.experts).cumsum(0).tolist()
        y = _products(x[tokens], ends, up)
        y = rows.gate(y, act) if len(up.spec.parts) > up.spec.experts else rows.activate(y, act)
        y = _products(y, ends, down)
        y.mul_(weights.flatten()[order, None])
        out = torch.zeros_like(x) if y.dtype == x.dtype else torch.zeros_like(x, dtype=y.dtype)
        return out.index_add_(0, tokens, y)


def _products(x: Tensor, ends: list[int], linear: Linear) -> Tensor:
    """Rows of x up to ends[e] times the weight of expert e: [N, in] -> [N, out]."""
    assert isinstance(linear.packed, StackedWeight)
    weight = linear.packed.weight.transpose(1, 2)
    bias = None if linear.bias is None else linear.bias.view(linear.spec.experts, -1)
    out, start = x.new_empty(x.shape[0], weight.shape[2]), 0
    for expert, end in enumerate(ends):
        if end > start:
            torch.mm(x[start:end], weight[expert], out=out[start:end])
            if bias is not None:
                out[start:end] += bias[expert]
            start = end
    return out


class Experts(nn.Module):
    """x [T, D], chosen experts [T, K] and their weights [T, K] -> [T, D]."""

    def __init__(self, up: Linear, down: Linear, act: str, kernel: ExpertKernel, rows: RowOps) -> None:
        super().__init__()
        if down.collectives is not None and down.bias is not None:
            raise PluginError(f"{down.spec.name}: experts with biases cannot be split over ranks")
        self.up, self.down = up, down
        self.act, self.kernel, self.rows = act, kernel, rows

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = self.kernel.apply(x, ids, weights, self.up, self.down, self.act, self.rows)
        return out if self.down.collectives is None else self.down.collectives.all_reduce(out)


class Router(nn.Module):
    """hidden [T, D] -> the chosen experts [T, K] int64 and the weight of each [T, K]."""

    def __init__(self, moe: MoEConfig, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.num_experts, hidden_size, dtype=dtype), requires_grad=False)
        bias = torch.empty(moe.num_experts, dtype=dtype)
        self.bias = nn.Parameter(bias, requires_grad=False) if moe.router_bias else None
        correction = torch.empty(moe.num_experts, dtype=torch.float32)
        self.correction = nn.Parameter(correction, requires_grad=False) if moe.correction else None

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        if self.moe.router_float32:
            logits = F.linear(h.float(), self.weight.float(), None if self.bias is None else self.bias.float())
        else:
            logits = F.linear(h, self.weight, self.bias).float()
        return self.choose(logits)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """From logits [T, E] float32. A correction takes part in the choice only, not in the weights."""
        moe = self.moe
        scores = logits.sigmoid() if moe.scoring == "sigmoid" else logits.softmax(-1)
        wanted = scores if self.correction is None else scores + self.correction
        if moe.num_groups > 1:
            wanted = self.best_groups(wanted)
        ids = wanted.topk(moe.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(1, ids)
        if moe.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + moe.epsilon)
        return ids, weights * moe.scale

    def best_groups(self, wanted: Tensor) -> Tensor:
        """Scores outside the best groups of experts do not count."""
        moe = self.moe
        groups = wanted.view(len(wanted), moe.num_groups, -1)
        best = groups.amax(-1) if moe.group_score == "max" else groups.topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(moe.top_groups, dim=-1).indices, True)
        return groups.masked_fill(~kept[..., None], 0.0 if moe.group_score == "max" else -torch.inf).flatten(1)


class MoE(nn.Module):
    """Routed experts, and a shared one that sees every token."""

    router_class: type[Router] = Router

    def __init__(self, cfg: DecoderConfig, path: str, specs: Specs, ctx: BuildContext) -> None:
        super().__init__()
        moe = cfg.moe
        assert moe is not None
        self.router = self.router_class(moe, cfg.hidden_size, ctx.dtype)
        self.experts = ctx.experts(
            specs[f"{path}.experts.up"], specs[f"{path}.experts.down"], moe.activation or cfg.activation
        )
        self.shared = GatedMLP(cfg, f"{path}.shared", specs, ctx) if moe.shared_size else None
        gate = torch.empty(1, cfg.hidden_size, dtype=ctx.dtype)
        self.shared_gate = nn.Parameter(gate, requires_grad=False) if moe.shared_gate else None

    def forward(self, h: Tensor) -> Tensor:
        ids, weights = self.router(h)
        out = self.experts(h, ids, weights.to(h.dtype))
        if self.shared is None:
            return out
        shared = self.shared(h)
        if self.shared_gate is not None:
            shared = shared * F.linear(h, self.shared_gate).sigmoid()
        return out.add_(shared)
