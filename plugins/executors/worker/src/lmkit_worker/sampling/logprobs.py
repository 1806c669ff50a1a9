"""Log-probabilities of raw logits: of the chosen token, its rank, and the most likely alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from lmkit.api import TokenLogprob
from lmkit_layers.vocabulary import topk
from torch import Tensor


class TokenChoice(NamedTuple):
    """What is asked of one row of logits."""

    token: int
    num_top: int


def row_index(rows: Sequence[int], device: torch.device) -> Tensor:
    """An index of rows that may be none: torch makes floats of an empty list, and these are no index."""
    return torch.tensor(rows, dtype=torch.int64, device=device)


def gather_logprobs(logprobs: Tensor, choices: Sequence[TokenChoice]) -> list[TokenLogprob]:
    """logprobs [N, V] float32 and N choices -> N TokenLogprobs. Rank 1 is the most likely; equals share a rank."""
    if not choices:
        return []
    ids = row_index([c.token for c in choices], logprobs.device)[:, None]
    chosen = logprobs.gather(-1, ids)
    most = max(c.num_top for c in choices)
    if most:
        values, tokens = (t.tolist() for t in topk(logprobs, min(most, logprobs.shape[-1])))
    else:
        values = tokens = [[] for _ in choices]
    of_chosen = chosen[:, 0].tolist()
    if most and all(value >= top[-1] for value, top in zip(of_chosen, values, strict=True)):
        ranks = [1 + sum(other > value for other in top) for value, top in zip(of_chosen, values, strict=True)]
    else:  # some are not among the first: all that are larger are counted
        larger = torch.gt(logprobs, chosen, out=torch.empty_like(logprobs))  # into floats: faster than into bools
        ranks = larger.sum(-1).int().add_(1).tolist()
    return [
        TokenLogprob(c.token, value, rank, list(zip(top_ids[: c.num_top], top_values[: c.num_top], strict=True)))
        for c, value, rank, top_ids, top_values in zip(choices, of_chosen, ranks, tokens, values, strict=True)
    ]
