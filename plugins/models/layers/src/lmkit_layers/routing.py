"""The choice of experts, in plain torch."""

from __future__ import annotations

import torch
from lmkit.api import Routing
from torch import Tensor


def choose(logits: Tensor, correction: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Logits [T, E] float32 -> the experts chosen [T, K] int64 and their weights [T, K] float32."""
    scores = logits.sigmoid() if routing.scoring == "sigmoid" else logits.softmax(-1)
    wanted = scores if correction is None else scores + correction
    if routing.num_groups > 1:
        wanted = best_groups(wanted, routing)
    ids = wanted.topk(routing.top_k, dim=-1, sorted=False).indices
    weights = scores.gather(1, ids)
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.epsilon)
    return ids, weights * routing.scale


def best_groups(wanted: Tensor, routing: Routing) -> Tensor:
    """Scores outside the best groups of experts do not count."""
    groups = wanted.unflatten(1, (routing.num_groups, -1))
    largest = routing.group_score == "max"
    best = groups.amax(-1) if largest else groups.topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(routing.top_groups, dim=-1).indices, True)
    return groups.masked_fill(~kept[..., None], 0.0 if largest else -torch.inf).flatten(1)
