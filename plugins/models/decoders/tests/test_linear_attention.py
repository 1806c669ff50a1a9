"""Layers with a state of fixed size: against a recurrence in float64, token by token, and against transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit.api import StateBatch
from lmkit_decoders import pieces
from lmkit_decoders.linear_attention import CHUNK, gated_delta_rule, lightning_attention, rg_lru
from lmkit_decoders.selective import selective_scan, ssd
from torch import Tensor
from torch.nn import functional as F

HEADS, K, V = 4, 6, 10
SLOTS = [3, 0, 5, 1]
Op = Callable[..., Tensor]
Rows = dict[str, Tensor]


def tokens(num: int, seed: int) -> Rows:
    """What the operators read for `num` tokens; two heads of queries and keys serve four of values."""
    g = torch.Generator().manual_seed(seed)
    return {
        "q": torch.randn(num, HEADS, K, generator=g),
        "k": torch.randn(num, HEADS, K, generator=g),
        "v": torch.randn(num, HEADS, V, generator=g),
        "decay": -torch.rand(num, HEADS, generator=g) * torch.tensor([0.0, 0.1, 2.0, 30.0]),
        "decays": -torch.rand(num, HEADS, K, generator=g) * torch.tensor([0.0, 0.1, 0.5, 2.0, 9.0, 40.0]),
        "beta": torch.rand(num, HEADS, generator=g),
        "x": torch.randn(num, K, generator=g),
        "gate": torch.rand(num, K, generator=g),
        "forget": -torch.rand(num, K, generator=g) * torch.linspace(0, 4, K),
    }


def delta(t: Rows, state: Tensor, rows: StateBatch, positions: Tensor) -> Tensor:
    return gated_delta_rule(t["q"][:, :2], t["k"][:, :2], t["v"], t["decay"], t["beta"], state, rows)


def channels(t: Rows, state: Tensor, rows: StateBatch, positions: Tensor) -> Tensor:
    return gated_delta_rule(t["q"][:, :2], t["k"][:, :2], t["v"], t["decays"], t["beta"], state, rows)


SLOPES = torch.tensor([-1e-5, -0.1, -0.5, -1.0])


def lightning(t: Rows, state: Tensor, rows: StateBatch, positions: Tensor) -> Tensor:
    return lightning_attention(t["q"], t["k"], t["v"], SLOPES, state, rows)


def lru(t: Rows, state: Tensor, rows: StateBatch, positions: Tensor) -> Tensor:
    return rg_lru(t["x"], t["gate"], t["forget"], state, rows, positions)


FORGET = -torch.rand(K, V, generator=torch.Generator().manual_seed(0)) * 8
FADE, SKIP = torch.tensor([-1e-4, -0.5, -4.0, -40.0]), torch.linspace(-1, 2, K)


def selective(t: Rows, state: Tensor, rows: StateBatch, positions: Tensor) -> Tensor:
    b, c = t["v"][:, :2].unbind(1)
    return selective_scan(t["x"], t["gate"], FORGET, b, c, SKIP, state, rows)


def duality(t: Rows, state: Tensor, rows: StateBatch, positions: Tensor) -> Tensor:
    return ssd(t["v"], t["beta"], FADE, t["k"][:, :2], t["q"][:, :2], SKIP[:HEADS], state, rows)


def selective_recurrence(t: Rows) -> tuple[Tensor, Tensor]:
    s, out = torch.zeros(K, V, dtype=torch.float64), []
    for x, dt, (b, c) in zip(t["x"], t["gate"], t["v"][:, :2], strict=True):
        s = s * (dt[:, None] * FORGET.double()).exp() + (dt * x)[:, None] * b
        out.append(s @ c + SKIP.double() * x)
    return torch.stack(out), s


def duality_recurrence(t: Rows) -> tuple[Tensor, Tensor]:
    """Two groups of keys and queries serve two heads each."""
    k, q = (t[name][:, :2].repeat_interleave(2, 1) for name in "kq")
    s, out = torch.zeros(HEADS, V, K, dtype=torch.float64), []
    for i, (x, dt) in enumerate(zip(t["v"], t["beta"], strict=True)):
        s = s * (dt * FADE.double()).exp()[:, None, None] + torch.einsum("h,hv,hk->hvk", dt, x, k[i])
        out.append(torch.einsum("hvk,hk->hv", s, q[i]) + SKIP[:HEADS].double()[:, None] * x)
    return torch.stack(out), s


def delta_recurrence(t: Rows, name: str = "decay") -> tuple[Tensor, Tensor]:
    q, k = (F.normalize(t[name][:, :2].repeat_interleave(2, 1), dim=-1) for name in "qk")
    s, out = torch.zeros(HEADS, K, V, dtype=torch.float64), []
    for i in range(len(q)):
        s = s * t[name][i].view(HEADS, -1, 1).exp()
        error = t["v"][i] - torch.einsum("hkv,hk->hv", s, k[i])
        s = s + torch.einsum("h,hk,hv->hkv", t["beta"][i], k[i], error)
        out.append(torch.einsum("hkv,hk->hv", s, q[i]) / K**0.5)
    return torch.stack(out), s


def lightning_recurrence(t: Rows) -> tuple[Tensor, Tensor]:
    s, out = torch.zeros(HEADS, K, V, dtype=torch.float64), []
    for q, k, v in zip(t["q"], t["k"], t["v"], strict=True):
        s = s * SLOPES.double().exp()[:, None, None] + torch.einsum("hk,hv->hkv", k, v)
        out.append(torch.einsum("hkv,hk->hv", s, q))
    return torch.stack(out), s


def lru_recurrence(t: Rows) -> tuple[Tensor, Tensor]:
    h, out = torch.zeros(K, dtype=torch.float64), []
    for i, (x, gate, forget) in enumerate(zip(t["x"], t["gate"], t["forget"], strict=True)):
        a = forget.exp()
        h = a * h + gate * x * (1.0 if i == 0 else (1 - a**2).sqrt())
        out.append(h)
    return torch.stack(out), h


CASES = {
    "delta": (delta, delta_recurrence, (HEADS, K, V)),
    "channels": (channels, partial(delta_recurrence, name="decays"), (HEADS, K, V)),
    "lightning": (lightning, lightning_recurrence, (HEADS, K, V)),
    "lru": (lru, lru_recurrence, (K,)),
    "selective": (selective, selective_recurrence, (K, V)),
    "duality": (duality, duality_recurrence, (HEADS, V, K)),
}


def batch_of(work: list[tuple[int, int]]) -> StateBatch:
    """(slot, number of tokens) of each row."""
    start = [0, *accumulate(num for _, num in work)]
    spans = [(slot, *span) for (slot, _), span in zip(work, pairwise(start), strict=True)]
    decodes = next((i for i, (_, num) in enumerate(work) if num > 1), len(work))
    return StateBatch([], torch.tensor([slot for slot, _ in work]), torch.tensor(start), decodes, spans[decodes:])


def run(op: Op, rows: list[Rows], steps: list[list[tuple[int, int]]], state: Tensor) -> list[Tensor]:
    """Steps of (row, number of its next tokens). Outputs of each row."""
    outputs: list[list[Tensor]] = [[] for _ in rows]
    for work in steps:
        spans = [(row, at := sum(map(len, outputs[row])), at + num) for row, num in work]
        tokens = {name: torch.cat([rows[row][name][a:b] for row, a, b in spans]) for name in rows[0]}
        positions = torch.cat([torch.arange(a, b) for _, a, b in spans])
        y = op(tokens, state, batch_of([(SLOTS[row], num) for row, num in work]), positions)
        for (row, num), part in zip(work, y.split([num for _, num in work]), strict=True):
            assert len(part) == num
            outputs[row].append(part)
    return [torch.cat(parts) for parts in outputs]


def close(got: Tensor, want: Tensor) -> bool:
    """To the precision of sums of float32, in which terms as large as the largest result cancel."""
    atol = 1e-5 * float(want.abs().max())
    return bool(torch.allclose(got.double(), want.double(), rtol=1e-4, atol=atol))


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.one_in(6)
def test_equals_the_recurrence_however_rows_are_cut(name: str, together: int, data: st.DataObject) -> None:
    op, recurrence, shape = CASES[name]
    sizes = st.sampled_from([1, 1, 2, 5, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
    num_rows = data.draw(st.integers(1, 4))
    steps = []
    for _ in range(data.draw(st.integers(1, 3))):
        work = [(row, data.draw(sizes)) for row in data.draw(st.permutations(range(num_rows)))]
        steps.append(sorted(work, key=lambda each: each[1] > 1))  # rows of one token come first
    state = torch.zeros(6, *shape)
    state[2] = 7.0  # of somebody else
    lengths = [sum(num for step in steps for row, num in step if row == each) for each in range(num_rows)]
    rows = [tokens(length, seed) for seed, length in enumerate(lengths)]
    with mock.patch.object(pieces, "HOST_ROWS", together):
        outputs = run(op, rows, steps, state)
    for row, got in enumerate(outputs):
        want, last = recurrence({key: x.double() for key, x in rows[row].items()})
        assert close(got, want)
        assert close(state[SLOTS[row]], last)
    assert bool((state[2] == 7.0).all())


def test_bfloat16_inputs_are_summed_in_float32() -> None:
    rows = {name: x.bfloat16() if name in "qkv" else x for name, x in tokens(40, 0).items()}
    got = run(delta, [rows], [[(0, 40)]], torch.zeros(6, HEADS, K, V))[0]
    assert got.dtype == torch.bfloat16
    want, _ = delta_recurrence({key: x.double() for key, x in rows.items()})
    assert torch.allclose(got.double(), want, rtol=1e-2, atol=1e-3)


def test_equals_transformers() -> None:
    """Their chunks and their steps."""
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    t = tokens(CHUNK + 9, 5)
    args = [t[name][None] for name in ("q", "k", "v", "decay", "beta")]
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    state = torch.zeros(1, HEADS, K, V)
    got = gated_delta_rule(t["q"], t["k"], t["v"], t["decay"], t["beta"], state, batch_of([(0, len(t["q"]))]))
    for theirs_op in (theirs.torch_chunk_gated_delta_rule, theirs.torch_recurrent_gated_delta_rule):
        want, last = theirs_op(*args, **options)
        assert close(got, want[0])
        assert close(state, last)
