"""The torch backend against dense attention."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit.api import AttnNeed, DeviceInfo
from lmkit_attention_torch.backend import TorchAttention
from lmkit_attention_torch.plan import PIECE, SMALL
from lmkit_testing import AttentionConformance
from lmkit_testing.attention import Rows


class TestTorch(AttentionConformance):
    plugin = "attention:torch"


NEED = AttnNeed(16, 4, 2, "float32", "float32", 8)


@pytest.mark.parametrize(
    "need",
    [
        replace(NEED, window=40),
        replace(NEED, v_head_dim=24),
        replace(NEED, window=5, softcap=3.0, sinks=True, alibi=True),
        replace(NEED, num_q_heads=6, num_kv_heads=6, alibi=True),
        replace(NEED, causal=False, softcap=3.0, sinks=True),
        replace(NEED, num_kv_heads=1, v_head_dim=8, mla=True),
        replace(NEED, num_kv_heads=1, v_head_dim=8, mla=True, window=5, softcap=3.0),
    ],
    ids=[
        "long window",
        "other value size",
        "everything",
        "alibi of six heads",
        "bidirectional softcap sinks",
        "latents",
        "latents, window",
    ],
)
def test_features_together(need: AttnNeed) -> None:
    rows = Rows(TorchAttention(), need, num_rows=3)
    steps = [[(0, 50), (1, 3)], [(0, 1), (1, 1), (2, 2)], [(1, 20), (0, 1)], [(2, 1), (1, 1)]]
    for work in steps if need.causal else steps[:1]:
        got, expected = rows.step(work)
        for g, e in zip(got, expected, strict=True):
            torch.testing.assert_close(g.double(), e, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_eight_bit_floats_are_rounded_to_nearest_and_cut(kv_dtype: str) -> None:
    """What is too large for the cache becomes its largest number, as in other backends; never NaN or infinite."""
    dtype = getattr(torch, kv_dtype)
    largest = torch.finfo(dtype).max
    rows = Rows(TorchAttention(), replace(NEED, kv_dtype=kv_dtype, num_kv_heads=1), num_rows=1)
    plan = rows.planner.plan(rows.paged.grow([(0, 2)]))
    x = torch.tensor([1e9, -1e9, torch.inf, largest * 1.04, *torch.randn(28).tolist()]).view(2, 1, 16)
    rows.backend.write_kv(x, -x, rows.kv, plan.slots)
    written = rows.kv.view(-1, 32)[plan.slots].float()
    expected = torch.cat([x, -x], -1).clamp(-largest, largest).to(dtype).float()
    assert torch.equal(written, expected[:, 0])


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_latents_are_kept_once(dtype: str) -> None:
    """What DeepSeek's attention keeps of a token and layer: 512 + 64 numbers, and no values beside them."""
    need = AttnNeed(576, 16, 1, "float32", dtype, 16, v_head_dim=512, mla=True)
    assert TorchAttention().kv_shape(need, 3) == (3, 16, 1, 576 + (8 if dtype == "int8" else 0))
    assert need.kv_bytes("bfloat16") == 1152
    rows = Rows(TorchAttention(), need, num_rows=2)
    for work in ([(0, 20), (1, 3)], [(0, 1), (1, 1)]):
        for got, expected in zip(*rows.step(work), strict=True):
            torch.testing.assert_close(got.double(), expected, atol=6e-2 if dtype == "int8" else 1e-5, rtol=1e-5)


def test_rows_of_very_different_length_are_not_padded_together() -> None:
    rows = Rows(TorchAttention(), replace(NEED, block_size=64), num_rows=3, length=3 * SMALL)
    rows.step([(0, 2 * SMALL + 10), (1, 5), (2, SMALL - 1)])
    plan = rows.planner.plan(rows.paged.grow([(0, 1), (1, 1), (2, 1)]))
    assert sorted(task.shape[0] for task in plan.tasks) == [1, 2]


def test_long_chunks_are_cut_into_pieces() -> None:
    """The bias of a chunk that continues a row is bounded; results do not depend on the cut."""
    need = AttnNeed(8, 1, 1, "float32", "float32", 64)
    rows = Rows(TorchAttention(), need, num_rows=1, length=2 * PIECE)
    rows.step([(0, 3)])
    got, expected = rows.step([(0, PIECE + 20)])
    torch.testing.assert_close(got[0].double(), expected[0], atol=1e-5, rtol=1e-5)


def test_reasons_for_refusal() -> None:
    backend, device = TorchAttention(), DeviceInfo("cpu", "cpu")
    assert backend.can_run(NEED, device) is None
    assert "mla" in (backend.can_run(replace(NEED, mla=True), device) or "")
    assert backend.can_run(replace(NEED, mla=True, v_head_dim=8), device) is None
    assert "multiple" in (backend.can_run(replace(NEED, num_q_heads=5), device) or "")
    assert "causal" in (backend.can_run(replace(NEED, causal=False, alibi=True), device) or "")


def test_alibi_slopes_of_powers_of_two_are_geometric() -> None:
    need = replace(NEED, num_q_heads=8)
    assert need.slopes == [2.0**-i for i in range(1, 9)]
    assert len(set(replace(NEED, num_q_heads=12).slopes)) == 12
    assert replace(NEED, num_q_heads=4, among=(4, 8)).slopes == need.slopes[4:]


STEPS = st.lists(
    st.dictionaries(st.integers(0, 3), st.integers(0, 20), min_size=1).map(lambda work: list(work.items())),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(
    steps=STEPS,
    block_size=st.integers(1, 20),
    window=st.none() | st.integers(1, 30),
    extras=st.fixed_dictionaries({"softcap": st.none() | st.just(4.0), "sinks": st.booleans(), "alibi": st.booleans()}),
)
def test_any_sequence_of_steps(steps: list, block_size: int, window: int | None, extras: dict) -> None:
    """Rows that start, rest, decode and continue in any order, over memory that holds NaN where nothing was written."""
    need = replace(NEED, head_dim=8, block_size=block_size, window=window, **extras)
    rows = Rows(TorchAttention(), need, num_rows=4, length=130)
    for work in steps:
        for got, expected in zip(*rows.step(work), strict=True):
            torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
