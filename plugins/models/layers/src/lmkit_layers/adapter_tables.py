"""AdapterTable: what all adapters change of one linear, or of the embedding, as products over all tokens of a step.

The columns of all adapters stand side by side: of x @ a each token keeps those of its adapter, and what is left is
multiplied by all b, one below another. So which adapter a token has is data on the device, and steps can be captured.
It is a grouped product written as a dense one: exact, and cheap as long as all ranks together are small beside the
linear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmkit_layers.embedding import Embedding

if TYPE_CHECKING:
    from lmkit_layers.linear import Linear


@dataclass(frozen=True, slots=True)
class Delta:
    """What one adapter adds to outputs [low, high) of a linear: x @ a @ b, the scale already in b. Embeddings take
    rows of a.

    With a `gain` the sum, but not the bias, is multiplied by it.
    """

    low: int
    high: int
    a: Tensor  # [in, rank]
    b: Tensor  # [rank, high - low]
    gain: Tensor | None = None  # [high - low]

    def to(self, device: torch.device) -> Delta:
        gain = None if self.gain is None else self.gain.to(device)
        return replace(self, a=self.a.to(device), b=self.b.to(device), gain=gain)


def share_of_rank(linear: Linear, deltas: Sequence[Delta]) -> list[Delta]:
    """What this rank's share of `linear` gets of `deltas`, which are of the whole."""
    if linear.deals > 1:
        deltas = _of_dealt(linear, deltas)
    if linear.size == 1 or linear.spec.shard == "none":
        return list(deltas)
    if linear.spec.shard == "row":
        inputs = linear.local.in_features
        return [replace(d, a=d.a[linear.rank // linear.deals * inputs :][:inputs].contiguous()) for d in deltas]
    outputs, found = _outputs(linear), []
    for delta in deltas:
        own = ((outputs >= delta.low) & (outputs < delta.high)).nonzero()[:, 0]
        if len(own):  # one after another: shares are in the order of the whole
            low, columns = int(own[0]), outputs[own] - delta.low
            gain = None if delta.gain is None else delta.gain[columns]
            found.append(Delta(low, low + len(own), delta.a, delta.b[:, columns].contiguous(), gain))
    return found


def _of_dealt(linear: Linear, deltas: Sequence[Delta]) -> list[Delta]:
    """Those of the experts that this rank has a share of, as if there were no others."""
    size = linear.dealt.total_out
    first = linear.rank % linear.deals * size
    return [replace(d, low=d.low - first, high=d.high - first) for d in deltas if first <= d.low < first + size]


def _outputs(linear: Linear) -> Tensor:
    """Which outputs of the whole (of experts: those dealt to it) a rank has. Of each part a share; there may be fewer
    of them than ranks."""
    parted = len(linear.dealt.parts) > 1
    whole, here = (s.out_features if parted else (s.total_out,) for s in (linear.dealt, linear.local))
    found, begin = [], 0
    for size, own in zip(whole, here, strict=True):
        first = begin + linear.rank * (size // own) // linear.size * own
        found.append(torch.arange(first, first + own))
        begin += size
    return torch.cat(found)


class Span(NamedTuple):
    """What adapters add to outputs [low, high): columns [first, end) of x @ a, times b [end - first, high - low]."""

    low: int
    high: int
    first: int
    end: int
    b: Tensor
    gains: list[tuple[int, Tensor]]  # by adapter, as Delta says


class AdapterTable:
    """For one module: adapters are numbers, -1 is none."""

    def __init__(
        self, deltas: Mapping[int, Sequence[Delta]], whole: Mapping[int, Tensor], device: torch.device
    ) -> None:
        """`deltas` and weights of its own, by adapter."""
        self.whole = [(number, weight.to(device)) for number, weight in whole.items()]
        spans: dict[tuple[int, int], list[tuple[int, Delta]]] = {}
        for number, found in deltas.items():
            for delta in found:
                spans.setdefault((delta.low, delta.high), []).append((number, delta))
        self.spans: list[Span] = []
        columns: list[Tensor] = []
        owners: list[int] = []  # of each column
        for (low, high), parts in sorted(spans.items()):
            first = len(owners)
            for number, delta in parts:
                columns.append(delta.a)
                owners += [number] * delta.a.shape[1]
            gains = [(number, delta.gain.to(device)) for number, delta in parts if delta.gain is not None]
            b = torch.cat([delta.b for _, delta in parts]).to(device)
            self.spans.append(Span(low, high, first, len(owners), b, gains))
        self.owners = tuple(owners)
        self.a = torch.cat(columns, 1).to(device) if columns else None

    def add(self, module: nn.Module, x: Tensor, out: Tensor, tokens: AdapterTokens) -> Tensor:
        """`out` [T, out] of `module`, a Linear or an Embedding, on x [T, in] (or ids [T]), with what adapters change.

        Changed in place where no adapter has a weight of its own.
        """
        linear: Linear | None = None if isinstance(module, Embedding) else module  # type: ignore[assignment]
        summed = linear is not None and linear.collectives is not None and not linear.gathers  # then comes the bias
        bias = None if linear is None or summed else linear.bias
        for number, weight in self.whole:
            own = weight[x] if linear is None else F.linear(x, weight, bias)
            out = torch.where(tokens.of(number), own, out)
        if self.a is None:
            return out
        h = self.a[x] if linear is None else x @ self.a
        h = h.masked_fill_(tokens.others(self.owners), 0)
        for low, high, first, end, b, gains in self.spans:
            part, change = out[:, low:high], h[:, first:end] @ b
            for number, gain in gains:
                added = gained(part, None if bias is None else bias[low:high], change, gain)
                change = torch.where(tokens.of(number), added, change)
            part += change
        return out


class AdapterTokens:
    """The adapter of each token [T] int64 on the device. Masks are made once, whatever the number of modules."""

    def __init__(self, adapters: Tensor, owners: Mapping[tuple[int, ...], Tensor]) -> None:
        """`owners`: tables' columns by adapter, as they are on the device."""
        self.adapters, self._owners = adapters, owners
        self._others: dict[tuple[int, ...], Tensor] = {}
        self._found: dict[int, Tensor] = {}

    def of(self, number: int) -> Tensor:
        """[T, 1]: tokens of this adapter."""
        return (self.adapters == number)[:, None]

    def others(self, owners: tuple[int, ...]) -> Tensor:
        """[T, columns]: those which the token's adapter does not own."""
        if owners not in self._others:
            self._others[owners] = self.adapters[:, None] != self._owners[owners]
        return self._others[owners]

    def numbers(self, number: int) -> Tensor:
        """Which tokens this adapter has [N]. The host waits to know how many there are."""
        if number not in self._found:
            self._found[number] = (self.adapters == number).nonzero()[:, 0]
        return self._found[number]


def gained(before: Tensor, bias: Tensor | None, change: Tensor, gain: Tensor) -> Tensor:
    """What is to be added to `before`, a linear's output, so that all of it but the bias has the gain."""
    plain = before if bias is None else before - bias
    return (plain + change) * gain - plain
