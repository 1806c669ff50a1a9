"""The choice of experts in one launch."""

from __future__ import annotations

import torch
import triton
from lmkit.api import Routing
from torch import Tensor

from lmkit_op_triton import moe_kernels as kernels


def held(experts: int, routing: Routing) -> tuple[int, int, int]:
    """What a program holds: groups, experts of a group, and the warps that do."""
    groups = triton.next_power_of_2(routing.num_groups)
    share = triton.next_power_of_2(experts // routing.num_groups)
    return groups, share, 1 if groups * share <= 256 else 4


def choose(logits: Tensor, correction: Tensor | None, routing: Routing, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> the experts chosen [T, K] int64, best first, and their weights [T, K]."""
    (tokens, experts), top_k = logits.shape, routing.top_k
    ids = torch.empty((tokens, top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((tokens, top_k), dtype=dtype, device=logits.device)
    if tokens:
        groups, share, warps = held(experts, routing)
        kernels.choose[(tokens,)](
            logits, logits if correction is None else correction, ids, weights,
            experts // routing.num_groups, logits.stride(0), routing.epsilon, routing.scale,
            routing.scoring == "sigmoid", correction is not None, routing.num_groups, routing.top_groups,
            routing.group_score == "two best", routing.renormalize, top_k,
            groups, share, triton.next_power_of_2(top_k), num_warps=warps,
        )  # fmt: skip
    return ids, weights
