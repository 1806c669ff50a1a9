"""What converters have done to single tensors, put back: the layout of the family's own checkpoints.

Each function takes the tensors of one, and the numbers that `Family.sizes` names: heads of queries and of keys; of
gated delta nets heads of keys, heads of values, and the size of a head of keys. Their heads of values lie with those of
one key together, in files those of all keys in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def transposed(weight: Tensor, *sizes: int) -> Tensor:
    """[out, in] -> [in, out]; a bias as it is."""
    return weight.T.contiguous() if weight.dim() == 2 else weight


def grouped(fused: Tensor, queries: int, keys: int) -> Tensor:
    """All queries, all keys, all values -> for each head of keys its queries, key and value."""
    size = fused.shape[0] // (queries + 2 * keys)
    parts = fused.split((queries * size, keys * size, keys * size))
    groups = [part.view(keys, -1, size, *fused.shape[1:]) for part in parts]
    return torch.cat(groups, 1).reshape(fused.shape)


def column(weight: Tensor, *sizes: int) -> Tensor:
    """Convolutions [D, K] -> [D, 1, K]; a bias as it is."""
    return weight.unsqueeze(1) if weight.dim() == 2 else weight


def latent(keys_up: Tensor, values_up: Tensor, *sizes: int) -> Tensor:
    """[H, rank, plain] and [H, value, rank] -> [H * (plain + value), rank]."""
    return torch.cat((keys_up.transpose(1, 2), values_up), 1).flatten(0, 1)


def row(values: Tensor, *sizes: int) -> Tensor:
    """[E] -> [1, E]."""
    return values.reshape(1, -1)


def flat(values: Tensor, *sizes: int) -> Tensor:
    """[H, 1] or [groups, D] -> [all]."""
    return values.flatten()


def logarithm(decay: Tensor, *sizes: int) -> Tensor:
    """-exp(x) -> x; [H, 1] -> [H]."""
    return torch.log(-decay.squeeze(-1) if decay.shape[-1:] == (1,) else -decay)


def values(rows: Tensor, keys: int, values: int, size: int) -> Tensor:
    """Rows of all values."""
    return rows.unflatten(0, (values // keys, keys, -1)).transpose(0, 1).flatten(0, 2)


def keys_values(rows: Tensor, keys: int, heads: int, size: int) -> Tensor:
    """Rows of queries and keys, which stay, and of values."""
    first = 2 * keys * size
    return torch.cat((rows[:first], values(rows[first:], keys, heads, size)))


def keys_values_column(weight: Tensor, keys: int, heads: int, size: int) -> Tensor:
    return keys_values(weight, keys, heads, size).unsqueeze(1)


def value_logarithm(decay: Tensor, keys: int, heads: int, size: int) -> Tensor:
    return values(torch.log(-decay), keys, heads, size)


def gated(rows: Tensor, gates: Tensor, keys: int, heads: int, size: int) -> Tensor:
    """All queries, keys and values; and gates of values -> for each head of keys its own of each."""
    parts = *rows.split((keys * size, keys * size, rows.shape[0] - 2 * keys * size)), gates
    return torch.cat([part.unflatten(0, (keys, -1)) for part in parts], 1).flatten(0, 1)


def value_columns(weight: Tensor, keys: int, heads: int, size: int) -> Tensor:
    """Columns of all values."""
    return weight.unflatten(1, (heads // keys, keys, -1)).transpose(1, 2).flatten(1)


LAYOUTS: Mapping[str, Callable[..., Tensor]] = {
    "transposed": transposed,
    "grouped": grouped,
    "column": column,
    "latent": latent,
    "row": row,
    "flat": flat,
    "logarithm": logarithm,
    "values": values,
    "keys_values": keys_values,
    "keys_values_column": keys_values_column,
    "value_logarithm": value_logarithm,
    "value_columns": value_columns,
    "gated": gated,
}
