"""The choice of experts in the laboratory: the reference's, or as good where some are equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hypothesis import example, given, settings
from hypothesis import strategies as st
from lmkit.api import Routing
from lmkit_layers.rowwise import TorchRowOps
from lmkit_op_triton import routing as module
from lmkit_op_triton.rowops import TritonRowOps
from lmkit_testing.triton_lab import lab, mutant
from torch import Tensor

OPS, REFERENCE = TritonRowOps(), TorchRowOps()
SOFTMAX = Routing(2, renormalize=False)
DEEPSEEK = Routing(
    4, "sigmoid", epsilon=1e-20, scale=2.5, num_groups=4, top_groups=2, group_score="two best", float32=True
)
GREEDY_GROUPS = Routing(3, renormalize=False, scale=16.0, num_groups=3, top_groups=1)


def check(routing: Routing, experts: int, corrected: bool, biased: bool, dtype: torch.dtype, seed: int = 0) -> None:
    noise = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise)

    x, weight = random(4, 24).to(dtype), random(experts, 24).to(dtype)
    bias = random(experts).to(dtype) if biased else None
    # below zero, experts of groups that are out would come first, as zeros, and in any order
    correction = random(experts).abs() / 4 if corrected else None
    want = REFERENCE.route(x, weight, bias, correction, routing)
    with lab(unwritten=("ids", "weights"), shuffle=seed) as seen:
        got = OPS.route(x, weight, bias, correction, routing)
    assert seen.launches == 1
    dense = [torch.zeros(4, experts).scatter(1, ids, weights.float()) for ids, weights in (got, want)]
    assert got[1].dtype == dtype
    torch.testing.assert_close(*dense, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-6)


@settings(max_examples=6, deadline=None)
@example(SOFTMAX, 6, False, True, torch.bfloat16, 0)
@example(DEEPSEEK, 24, True, False, torch.bfloat16, 1)
@example(GREEDY_GROUPS, 15, False, False, torch.float32, 2)
@given(
    st.sampled_from([SOFTMAX, DEEPSEEK, GREEDY_GROUPS, Routing(1), Routing(8, "sigmoid")]),
    st.sampled_from([12, 60, 96]), st.booleans(), st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.integers(0, 99),
)  # fmt: skip
def test_choices(routing: Routing, experts: int, corrected: bool, biased: bool, dtype: torch.dtype, seed: int) -> None:
    check(routing, experts, corrected, biased, dtype, seed)


@pytest.mark.parametrize("routing", [SOFTMAX, DEEPSEEK, GREEDY_GROUPS], ids=["softmax", "two best", "max"])
def test_choices_are_experts_whatever_the_logits(routing: Routing) -> None:
    """Rows that stand for nothing may hold anything; what is no number shows in the weights."""
    logits = torch.zeros(6, 12)
    logits[1, 3], logits[2, :] = float("nan"), float("nan")
    logits[3, 5], logits[4, :] = float("inf"), -float("inf")
    with lab(unwritten=("ids", "weights")):
        ids, weights = module.choose(logits, None, routing, torch.float32)
    assert ((ids >= 0) & (ids < 12)).all()
    assert all(len(set(row)) == routing.top_k for row in ids.tolist()), "each expert once"
    assert weights[1:3].isnan().any(1).all()
    assert ids[0].tolist() == list(range(routing.top_k)), "the first of equals"
    assert module.choose(logits[:0], None, routing, torch.float32)[0].shape == (0, routing.top_k)


FAULTS = {
    "an expert twice": ("        real = tl.where(place == at, 0, real)\n", "", DEEPSEEK),
    "weighed with the correction": ("place == at, scores, 0.0", "place == at, wanted, 0.0", DEEPSEEK),
    "the best counts twice": ("tl.where(place == at, -float(\"inf\"), inside)", "inside", DEEPSEEK),
    "one group too few": ("tl.static_range(TOP_GROUPS)", "tl.static_range(TOP_GROUPS - 1)", DEEPSEEK),
    "groups overlap": ("group * share + member", "group * (share - 1) + member", DEEPSEEK),
    "not divided": ("if NORMED", "if not NORMED", DEEPSEEK),
    "not scaled": ("taken * scale", "taken + 0 * scale", DEEPSEEK),
    "another temperature": ("scores = tl.exp(x - ", "scores = tl.exp(0.99 * x - ", SOFTMAX),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str, tmp_path: Path) -> None:
    old, new, routing = FAULTS[name]

    def work() -> None:
        for seed in range(5):
            check(routing, 24, routing is DEEPSEEK, False, torch.float32, seed)

    work()
    with mutant(module, old, new, tmp_path), pytest.raises(AssertionError):
        work()
