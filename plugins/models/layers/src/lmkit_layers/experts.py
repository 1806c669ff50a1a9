"""Mixtures of experts: a router that chooses some experts for each token, and the experts, stacked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from lmkit.api import (
    CannotSplit,
    DeviceInfo,
    ExpertKernel,
    LinearKernel,
    LinearSpec,
    PackedWeight,
    QuantFormat,
    Routing,
    RowOps,
)
from torch import Tensor, nn

from lmkit_layers.linear import Linear


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The weight of each expert as a linear kernel wants it."""

    experts: list[PackedWeight]

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.experts)


def dealt_experts(spec: LinearSpec, rank: int, deals: int) -> LinearSpec:
    """The experts of `rank`, of those stacked in `spec`: `deals` ranks that follow each other have all of them.

    Raises CannotSplit where they do not divide.
    """
    if not spec.experts or spec.experts % deals:
        raise CannotSplit(f"{spec.name}: {spec.experts} experts cannot be dealt out to {deals} ranks")
    num = len(spec.out_features) // deals
    own = slice(rank % deals * num, (rank % deals + 1) * num)
    return replace(spec, out_features=spec.out_features[own], parts=spec.parts[own], experts=spec.experts // deals)


def one_expert(spec: LinearSpec) -> LinearSpec:
    """The linear of a single expert among those stacked in `spec`."""
    share = len(spec.out_features) // spec.experts
    return replace(spec, out_features=spec.out_features[:share], parts=(), experts=0)


class LinearExperts:
    """Tokens sorted by expert; a linear kernel runs for each expert that has any.

    What serves where no kernel for experts is installed, with every weight format that has a linear kernel.
    A format may know the sizes of its layer: `one` is that of a single expert; None: there is no difference.
    """

    name = "moe_linear"
    skips = True

    def __init__(self, kernel: LinearKernel, one: QuantFormat | None = None) -> None:
        self.kernel, self.one = kernel, one

    def can_run(self, fmt: QuantFormat, layer: LinearSpec, device: DeviceInfo, act: str | None = None) -> str | None:
        return self.kernel.can_run(self.one or fmt, one_expert(layer), device)

    def pack(self, fmt: QuantFormat, params: dict[str, Tensor], layer: LinearSpec, dtype: torch.dtype) -> PackedExperts:
        stored = fmt.params(layer, str(dtype).removeprefix("torch."))
        split: dict[str, Sequence[Tensor]] = {}
        for key in list(params):
            tensor, axis = params.pop(key), stored[key].part_axis
            split[key] = [tensor] * layer.experts if axis is None else tensor.chunk(layer.experts, axis)
        spec = one_expert(layer)
        pieces = ({key: tensors[e] for key, tensors in split.items()} for e in range(layer.experts))
        return PackedExperts([self.kernel.pack(self.one or fmt, piece, spec, dtype) for piece in pieces])

    def apply(
        self, x: Tensor, ids: Tensor, weights: Tensor, up: Linear, down: Linear, act: str, rows: RowOps
    ) -> Tensor:
        assert isinstance(up.packed, PackedExperts)
        order = ids.flatten().argsort(stable=True)  # (token, choice) pairs, by expert
        skipped, *ends = torch.bincount(ids.flatten() + 1, minlength=len(up.packed.experts) + 1).cumsum(0).tolist()
        order = order[skipped:]
        tokens = order // ids.shape[1]
        y = self._products(x[tokens], [end - skipped for end in ends], up)
        y = rows.gate(y, act) if len(up.spec.parts) > up.spec.experts else rows.activate(y, act)
        y = self._products(y, [end - skipped for end in ends], down)
        pairs = y.new_zeros(ids.numel(), y.shape[1]).index_copy_(0, order, y)  # in the order of tokens again
        return torch.bmm(weights[:, None], pairs.view(*ids.shape, y.shape[1]))[:, 0]

    def _products(self, x: Tensor, ends: list[int], linear: Linear) -> Tensor:
        """Rows of x up to ends[e] through the linear of expert e: [N, in] -> [N, out]."""
        assert isinstance(linear.packed, PackedExperts)
        assert isinstance(linear.kernel, LinearExperts)
        kernel = linear.kernel.kernel
        biases = None if linear.bias is None else linear.bias.view(len(linear.packed.experts), -1)
        parts, start = [], 0
        for expert, end in enumerate(ends):
            if end > start:
                bias = None if biases is None else biases[expert]
                parts.append(kernel.apply(x[start:end], linear.packed.experts[expert], bias))
                start = end
        return torch.cat(parts) if parts else x.new_empty(0, linear.spec.total_out // linear.spec.experts)


class Experts(nn.Module):
    """x [T, D], chosen experts [T, K] and their weights [T, K] -> [T, D].

    Where experts are dealt out to ranks, hidden states are the same on all of them: each computes what its own experts
    say, and the sum over ranks brings it together.
    """

    numbers: Tensor | None  # here, of the experts of the model; -1: another rank has it

    def __init__(self, up: Linear, down: Linear, act: str, kernel: ExpertKernel, rows: RowOps) -> None:
        super().__init__()
        down.silent = down.collectives is not None and down.rank // down.deals > 0  # one rank adds biases for all
        self.up, self.down = up, down
        self.act, self.kernel, self.rows = act, kernel, rows
        numbers = None
        if up.deals > 1:
            numbers = torch.full((up.spec.experts,), -1, dtype=torch.int64, device="cpu")
            own = up.local.experts
            numbers[up.rank % up.deals * own :][:own] = torch.arange(own, device="cpu")
        self.register_buffer("numbers", numbers, persistent=False)

    def here(self, ids: Tensor) -> Tensor:
        """The experts as this rank numbers them; -1: another has it."""
        return ids if self.numbers is None else self.numbers[ids]

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = self.kernel.apply(x, self.here(ids), weights, self.up, self.down, self.act, self.rows)
        return out if self.down.collectives is None else self.down.collectives.all_reduce(out)


class Router(nn.Module):
    """hidden [T, D] -> the chosen experts [T, K] int64 and the weight of each [T, K]."""

    def __init__(
        self,
        routing: Routing,
        num_experts: int,
        hidden_size: int,
        dtype: torch.dtype,
        rows: RowOps,
        *,
        bias: bool = False,
        correction: bool = False,
    ) -> None:
        """`correction`: a float32 vector is added to the scores for the choice, not for the weights."""
        super().__init__()
        self.routing, self.rows = routing, rows
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(num_experts, dtype=dtype), requires_grad=False) if bias else None
        corrected = torch.empty(num_experts, dtype=torch.float32)
        self.correction = nn.Parameter(corrected, requires_grad=False) if correction else None

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return self.rows.route(h, self.weight, self.bias, self.correction, self.routing)


class Mixture(nn.Module):
    """Routed experts, and perhaps a `shared` one that sees every token, weighed by the sigmoid of a gate [1, D]."""

    router: Router
    experts: Experts
    shared: nn.Module | None
    shared_gate: nn.Parameter | None
