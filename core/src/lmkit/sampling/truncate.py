"""min_p, top_k and top_p without sorting the vocabulary. What a row gets does not depend on its neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

FEW = 64  # tokens that usually hold the share asked of top_p
_BUCKET_SHIFT = 20  # exponent and 3 bits of the mantissa of a float32: 1017 buckets for weights up to 1


def min_p_(x: Tensor, min_p: Tensor) -> None:
    """Removes tokens less likely than min_p times the most likely. In place on log-weights x [S, V], row maximum 0."""
    x.masked_fill_(x < min_p.log()[:, None], -torch.inf)


def top_k_(x: Tensor, k: Tensor) -> None:
    """Keeps the k largest of each row, and equals of the k-th. x [S, V], k [S] int64, 1 <= k <= V; in place."""
    largest = x.topk(int(k.max()), dim=-1).values
    x.masked_fill_(x < largest.gather(-1, k[:, None] - 1), -torch.inf)


def top_p_(w: Tensor, p: Tensor) -> None:
    """Keeps the most likely tokens until they hold a share p of the row's weight, and equals of the last. In place.

    w [S, V] float32 weights from 0 to 1; p [S].
    """
    target = p.double() * w.sum(-1).double()
    largest = w.topk(min(FEW, w.shape[-1]), dim=-1).values
    reached = largest.cumsum(-1, dtype=torch.float64) >= target[:, None]
    threshold = largest.gather(-1, reached.int().argmax(-1, keepdim=True))  # of the first that reaches the share
    for row in torch.nonzero(~reached[:, -1])[:, 0].tolist():
        threshold[row] = _threshold(w[row], target[row])
    w.masked_fill_(w < threshold, 0.0)


def _threshold(w: Tensor, target: Tensor) -> Tensor:
    """The smallest weight of w [V] among the largest that hold `target` together.

    The bits of a non-negative float order like the float: their upper part is a bucket. Weights are added up by
    bucket; only the bucket in which the target lies is sorted.
    """
    bucket = w.view(torch.int32) >> _BUCKET_SHIFT
    weight = torch.zeros(int(bucket.max()) + 1, dtype=torch.float64, device=w.device)
    weight.scatter_add_(0, bucket.long(), w.double())
    held = weight.flip(0).cumsum(0)  # by the buckets from the largest down
    first = torch.searchsorted(held, target).clamp_(max=len(held) - 1)
    inside = w[bucket == len(held) - 1 - first].sort(descending=True).values
    ends = inside.cumsum(0, dtype=torch.float64) + torch.where(first > 0, held[first - 1], 0.0)
    return inside[torch.searchsorted(ends, target).clamp_(max=len(ends) - 1)]
