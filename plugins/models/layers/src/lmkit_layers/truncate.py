"""Temperature, min_p, top_k and top_p without sorting the vocabulary. A row does not depend on its neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from lmkit.api import DrawParams
from torch import Tensor

from lmkit_layers.vocabulary import topk

FEW = 64  # tokens that usually hold the share asked of top_p
_BUCKET_SHIFT = 20  # exponent and 3 bits of the mantissa of a float32: 1017 buckets for weights up to 1


def weigh(x: Tensor, params: DrawParams) -> tuple[Tensor, Tensor]:
    """Logits [S, V] float32 -> the weights to draw from, in place, row maximum 1; and each row's largest logit [S].

    Where that is no finite number all tokens weigh the same.
    """
    best = x.amax(-1, keepdim=True)
    # The maximum is taken off first: the quotient stays finite for any temperature. Powers of 2, because torch's
    # exp is up to a hundred times slower where the result vanishes, as it does for most of a vocabulary.
    scale = torch.from_numpy(params.temperature * np.float32(math.log(2))).to(x.device)
    x = x.sub_(best).div_(scale[:, None])
    faulty = ~torch.isfinite(best[:, 0])
    if bool(faulty.any()):
        x[faulty] = 0.0
    weights = x.exp2_()
    _on_rows(min_p_, weights, params.min_p, params.min_p > 0)
    _on_rows(top_k_, weights, params.top_k, params.top_k > 0)
    _on_rows(top_p_, weights, params.top_p, params.top_p < 1)
    return weights, best[:, 0]


def _on_rows(step: Callable[[Tensor, Tensor], None], x: Tensor, values: np.ndarray, wanted: np.ndarray) -> None:
    """step(x, values), in place, on the wanted rows only."""
    if wanted.all():
        step(x, torch.from_numpy(values).to(x.device))
    elif wanted.any():
        rows = torch.from_numpy(np.flatnonzero(wanted)).to(x.device)
        part = x[rows]
        step(part, torch.from_numpy(values[wanted]).to(x.device))
        x[rows] = part


def min_p_(w: Tensor, min_p: Tensor) -> None:
    """Removes tokens less likely than min_p [S] times the most likely. In place on weights w [S, V], row maximum 1."""
    _keep(w, min_p[:, None])


def top_k_(w: Tensor, k: Tensor) -> None:
    """Keeps the k largest of each row, and equals of the k-th. In place; w [S, V], k [S] int64, 1 <= k <= V."""
    largest, _ = topk(w, int(k.max()))
    _keep(w, largest.gather(-1, k[:, None] - 1))


def top_p_(w: Tensor, p: Tensor) -> None:
    """Keeps the most likely tokens until they hold a share p of the row's weight, and equals of the last. In place.

    w [S, V] float32 weights from 0 to 1; p [S].
    """
    target = p.double() * w.sum(-1).double()
    largest, _ = topk(w, min(FEW, w.shape[-1]))
    reached = largest.cumsum(-1, dtype=torch.float64) >= target[:, None]
    threshold = largest.gather(-1, reached.int().argmax(-1, keepdim=True))  # of the first that reaches the share
    for row in torch.nonzero(~reached[:, -1])[:, 0].tolist():
        threshold[row] = _threshold(w[row], target[row])
    _keep(w, threshold)


def _keep(w: Tensor, threshold: Tensor) -> None:
    """Weights below the threshold [S, 1] become 0. Comparing into floats is several times faster than into bools."""
    w.mul_(torch.ge(w, threshold, out=torch.empty_like(w)))


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
