"""Mixtures of experts: stacked ones against one expert at a time, and the routers' choices."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit.api import (
    CannotSplit,
    DeviceInfo,
    LinearSpec,
    PackedWeight,
    PluginError,
    QuantFormat,
    Routing,
    SelectionError,
)
from lmkit_layers import LinearExperts, ReferenceLinear, TorchRowOps
from lmkit_layers.build import Builder
from lmkit_layers.experts import Experts
from lmkit_layers.linear import PLAIN, Linear, PlainFormat
from lmkit_layers.routing import choose
from lmkit_testing.steps import Ranks
from torch import Tensor
from torch.nn import functional as F

D, M = 6, 4


def stacked(name: str, num: int, parts: tuple[str, ...], into: int, out: int, bias: bool) -> Linear:
    spec = LinearSpec(name, into, (out,) * len(parts), bias, "none", parts, (), num)
    linear = Linear(spec, PLAIN, LinearExperts(ReferenceLinear()), torch.float32)
    for parameter in linear.parameters():
        parameter.data = torch.randn_like(parameter)
    return linear


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9), st.integers(1, 5), st.integers(1, 3), st.booleans(), st.booleans(), st.integers(0, 99))
def test_experts_equal_one_at_a_time(tokens: int, num: int, top_k: int, gated: bool, bias: bool, seed: int) -> None:
    torch.manual_seed(seed)
    top_k = min(top_k, num)
    parts = tuple(f"{e}.{p}" for e in range(num) for p in (("gate", "up") if gated else ("up",)))
    up = stacked("up", num, parts, D, M, bias)
    down = stacked("down", num, tuple(map(str, range(num))), M, D, bias)
    up_weight, down_weight = up.weight.data.view(num, -1, D), down.weight.data.view(num, D, M)
    biases = [x.bias.view(num, -1) if x.bias is not None else torch.zeros(num, 1) for x in (up, down)]
    up.pack()
    down.pack()
    x, weights = torch.randn(tokens, D), torch.rand(tokens, top_k)
    ids = torch.stack([torch.randperm(num)[:top_k] for _ in range(tokens)]) if tokens else torch.zeros(0, top_k).long()
    got = Experts(up, down, "silu", LinearExperts(ReferenceLinear()), TorchRowOps())(x, ids, weights)
    want = torch.zeros(tokens, D)
    for t in range(tokens):
        for e, weight in zip(ids[t].tolist(), weights[t], strict=True):
            y = x[t] @ up_weight[e].T + biases[0][e]
            y = F.silu(y[:M]) * y[M:] if gated else F.silu(y)
            want[t] += weight * (y @ down_weight[e].T + biases[1][e])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", [0, 5])
def test_experts_of_other_ranks_add_nothing(tokens: int) -> None:
    torch.manual_seed(0)
    up, down = stacked("up", 4, tuple("abcdefgh"), D, M, True), stacked("down", 4, tuple("abcd"), M, D, True)
    up.pack()
    down.pack()
    experts, x, weights = LinearExperts(ReferenceLinear()), torch.randn(tokens, D), torch.rand(tokens, 2)
    ids = torch.rand(tokens, 4).topk(2).indices

    def said(ids: Tensor, weights: Tensor) -> Tensor:
        return experts.apply(x, ids, weights, up, down, "silu", TorchRowOps())

    torch.testing.assert_close(said(ids.masked_fill(ids > 1, -1), weights), said(ids, weights.masked_fill(ids > 1, 0)))
    assert torch.equal(said(torch.full_like(ids, -1), weights), torch.zeros_like(x))


class Other(PlainFormat):
    name = "other"


class HalfScheme:
    """The second of two linears is stored otherwise."""

    def for_layer(self, layer: LinearSpec) -> QuantFormat | None:
        return Other() if layer.name == "down" else None


class OtherLinear(ReferenceLinear):
    name = "linear_other"

    def can_run(self, fmt: QuantFormat, layer: LinearSpec, device: DeviceInfo) -> str | None:
        return None if fmt.name == "other" else "only others"

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        return super().apply(x, weight, bias) * 2


class SiluExperts(LinearExperts):
    name = "moe_silu"

    def can_run(self, fmt: QuantFormat, layer: LinearSpec, device: DeviceInfo, act: str | None = None) -> str | None:
        return f"not {fmt.name}" if fmt.name != "plain" else None if act in (None, "silu") else f"not {act}"


UP = LinearSpec("up", D, (M,) * 6, False, "none", tuple("abcdef"), (), 3)
DOWN = LinearSpec("down", M, (D,) * 3, False, "none", tuple("abc"), (), 3)


def builder(scheme: Any = None, strict: frozenset[str] = frozenset(), special: Any = None, **ranks: Any) -> Builder:
    kernels = {"linear:plain": [ReferenceLinear()], "linear:other": [OtherLinear()]}
    info: Any = SimpleNamespace(linears=(UP, DOWN), kv_groups=list)
    kernels["moe:plain"] = [special or SiluExperts(ReferenceLinear())]
    return Builder(info, torch.float32, DeviceInfo("cpu", "cpu"), None, kernels, scheme=scheme, strict=strict, **ranks)


def test_a_kernel_for_experts_runs_both_linears_or_none() -> None:
    made = builder()
    experts = made.experts(UP, DOWN, "silu")
    assert (experts.kernel.name, experts.up.kernel.name, experts.down.kernel.name) == ("moe_silu",) * 3
    assert made.warnings == []
    assert made.experts(UP, DOWN, "relu").kernel.name == "moe_linear"
    assert made.warnings == ["up: not on moe_silu (not relu)"]


class OwnExperts(SiluExperts):
    skips = False


def test_a_kernel_that_computes_all_experts_serves_no_rank_that_has_some() -> None:
    ranks = {"special": OwnExperts(ReferenceLinear()), "collectives": Ranks(3).rank(1), "deals": 3}
    made = builder(**ranks)
    experts = made.experts(UP, DOWN, "silu")
    assert (experts.kernel.name, experts.up.local.parts, experts.here(torch.arange(3)).tolist()) == (
        "moe_linear", ("c", "d"), [-1, 0, -1],
    )  # fmt: skip
    assert made.warnings == ["up: not on moe_silu (does not leave out experts of other ranks)"]
    with pytest.raises(SelectionError, match="does not leave out experts of other ranks"):
        builder(strict=frozenset({"moe:plain"}), **ranks).experts(UP, DOWN, "silu")


def test_experts_that_cannot_be_dealt_out() -> None:
    with pytest.raises(CannotSplit, match="3 experts cannot be dealt out to 2 ranks"):
        builder(collectives=Ranks(2).rank(0), deals=2).experts(UP, DOWN, "silu")
    with pytest.raises(CannotSplit, match="1 ranks cannot deal out experts to 3"):
        builder(deals=3).experts(UP, DOWN, "silu")


def test_kernels_for_experts_that_were_named_run_or_nothing_does() -> None:
    made = builder(strict=frozenset({"moe:plain"}))
    assert made.experts(UP, DOWN, "silu").kernel.name == "moe_silu"
    with pytest.raises(SelectionError, match=r"up: not on moe_silu \(not relu\)"):
        made.experts(UP, DOWN, "relu")


def test_linears_of_experts_may_have_different_formats() -> None:
    """Each runs on the kernel that packed it."""
    made = builder(HalfScheme())
    experts = made.experts(UP, DOWN, "silu")
    assert made.warnings == ["up: not on moe_silu (not other)"]
    for linear in (experts.up, experts.down):
        linear.weight.data = torch.randn_like(linear.weight)
        linear.pack()
    x, ids, weights = torch.randn(2, D), torch.tensor([[0], [2]]), torch.ones(2, 1)
    doubled = experts(x, ids, weights)
    plain = builder().experts(UP, DOWN, "relu")
    for mine, theirs in ((plain.up, experts.up), (plain.down, experts.down)):
        mine.packed = theirs.packed
    plain.act = "silu"
    torch.testing.assert_close(doubled, 2 * plain(x, ids, weights))


class SizedFormat(PlainFormat):
    """One that knows how many rows its layer has."""

    name = "sized"

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def dequantize(self, params: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return params["weight"].to(dtype).view(self.rows, -1)


class SizedScheme:
    def for_layer(self, layer: LinearSpec) -> QuantFormat | None:
        return SizedFormat(layer.total_out)


def test_each_expert_has_a_format_of_its_own() -> None:
    """That of the whole layer says what is loaded, that of one expert what its kernel gets."""
    info: Any = SimpleNamespace(linears=(UP, DOWN), kv_groups=list)
    kernels = {"linear:sized": [ReferenceLinear()]}
    made = Builder(info, torch.float32, DeviceInfo("cpu", "cpu"), None, kernels, scheme=SizedScheme())  # type: ignore[arg-type]
    experts, plain = made.experts(UP, DOWN, "silu"), builder().experts(UP, DOWN, "relu")
    assert isinstance(experts.up.format, SizedFormat)
    assert experts.up.format.rows == 6 * M
    for mine, theirs in ((experts.up, plain.up), (experts.down, plain.down)):
        mine.weight.data = theirs.weight.data = torch.randn_like(mine.weight)
        mine.pack()
        theirs.pack()
        for one, other in zip(mine.packed.experts, theirs.packed.experts, strict=True):
            assert torch.equal(one.weight, other.weight)


def test_a_kernel_that_fails_is_named() -> None:
    linear = Linear(LinearSpec("some", D, (M,)), SizedFormat(5), ReferenceLinear(), torch.float32)
    linear.weight.data = torch.randn_like(linear.weight)
    with pytest.raises(PluginError, match=r"some: linear_reference cannot pack sized: .*shape"):
        linear.pack()


def routing(**fields: Any) -> Routing:
    return Routing(**{"top_k": 2, **fields})


LOGITS = torch.tensor([[2.0, 1.0, 1.5, -1.0]])


def chosen(made: Routing, correction: Tensor | None = None) -> dict[int, float]:
    ids, weights = choose(LOGITS, correction, made)
    return dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))


def test_softmax_and_sigmoid_scores() -> None:
    shares = LOGITS.softmax(-1)[0]
    both = float(shares[0] + shares[2])
    assert chosen(routing()) == pytest.approx({0: float(shares[0]) / both, 2: float(shares[2]) / both})
    plain = chosen(routing(renormalize=False, scale=2.0))
    assert plain == pytest.approx({0: 2 * float(shares[0]), 2: 2 * float(shares[2])})
    assert chosen(routing(scoring="sigmoid", renormalize=False))[0] == float(LOGITS.sigmoid()[0, 0])


def test_a_correction_changes_the_choice_and_not_the_weights() -> None:
    made = routing(scoring="sigmoid", renormalize=False)
    assert chosen(made, torch.tensor([0.0, 0.0, 0.0, 9.0])) == {
        3: float(LOGITS.sigmoid()[0, 3]),
        0: float(LOGITS.sigmoid()[0, 0]),
    }


def test_experts_come_from_the_best_groups() -> None:
    """Group 0 has the best expert; by its two best, group 0 (3.0) beats group 1 (0.5) too."""
    assert set(chosen(routing(num_groups=2, top_groups=1))) == {0, 1}
    made = routing(num_groups=2, top_groups=1, group_score="two best", scoring="sigmoid")
    assert set(chosen(made, torch.tensor([-2.0, 0.0, 0.0, 1.0]))) == {2, 3}
