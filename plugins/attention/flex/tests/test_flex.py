"""FlexAttention against dense attention: not compiled, and compiled for CPUs, whose kernel reads the same lists."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit.api import AttentionRequest, AttnNeed, DeviceInfo
from lmkit.plugins.host import PluginHost
from lmkit.plugins.select import consider
from lmkit.plugins.switches import Switches
from lmkit_attention_flex.backend import FlexAttention
from lmkit_attention_flex.plan import TILE, FlexPlanner
from lmkit_testing import AttentionConformance
from lmkit_testing.attention import Rows
from torch.nn.attention.flex_attention import flex_attention

NEED = AttnNeed(16, 4, 2, "float32", "float32", 16)


class TestFlex(AttentionConformance):
    plugin = "attention:flex"


def close(rows: Rows, *steps: list[tuple[int, int]]) -> None:
    for work in steps:
        for got, expected in zip(*rows.step(work), strict=True):
            torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "need",
    [
        replace(NEED, window=40),
        replace(NEED, window=5, softcap=3.0, sinks=True, alibi=True),
        replace(NEED, window=37, chunked=True, v_head_dim=32),
        replace(NEED, causal=False, window=20),
    ],
    ids=["long window", "everything", "chunks across pages", "both ways"],
)
def test_features_together(need: AttnNeed) -> None:
    rows = Rows(FlexAttention(), need, num_rows=3, length=300)
    steps = [[(0, 50), (1, 3)], [(0, 1), (1, 1), (2, TILE + 20)], [(1, 20), (0, 1), (2, 1)], [(2, 90), (1, 1)]]
    close(rows, *(steps if need.causal else [[(0, 50), (1, TILE + 30)]]))


STEPS = st.lists(
    st.dictionaries(st.integers(0, 3), st.integers(0, 20), min_size=1).map(lambda work: list(work.items())),
    min_size=1,
    max_size=6,
)


@settings(max_examples=15, deadline=None)
@given(STEPS, st.sampled_from([16, 32]), st.none() | st.integers(1, 40), st.booleans())
def test_any_sequence_of_steps(steps: list, size: int, window: int | None, chunked: bool) -> None:
    """Rows that start, rest, decode and continue in any order, over memory that holds NaN where nothing was written."""
    need = replace(NEED, block_size=size, window=window, chunked=chunked and window is not None)
    close(Rows(FlexAttention(), need, num_rows=4, length=130), *steps)


SEES: dict[str, Callable[[int, int], bool]] = {
    "causal": lambda at, key: key <= at,
    "window": lambda at, key: at - 37 < key <= at,
    "chunked": lambda at, key: key <= at and key // 37 == at // 37,
    "bidirectional": lambda at, key: True,
    "bidirectional window": lambda at, key: abs(at - key) < 37,
    "bidirectional chunked": lambda at, key: key // 37 == at // 37,
}


@pytest.mark.parametrize("kind", SEES)
@pytest.mark.parametrize(("past", "count"), [(0, 300), (70, 141), (36, 1), (45, 260)])
def test_lists_name_the_pages_that_are_seen(kind: str, past: int, count: int) -> None:
    """Each page of which a tile sees something once: as a whole where all its queries see all of it. None beside."""
    need = replace(NEED, causal=not kind.startswith("bidirectional"), chunked="chunked" in kind)
    need = replace(need, window=None if kind in ("causal", "bidirectional") else 37)
    rows = Rows(FlexAttention(), need, num_rows=1, length=600)
    if past:
        rows.paged.grow([(0, past)], "cpu")
    batch = rows.paged.grow([(0, count)], "cpu")
    (task,) = FlexPlanner(need, torch.device("cpu")).plan(batch).tasks
    table, length = batch.table.host[0].tolist(), past + count
    for i, first in enumerate(range(past, length, TILE)):
        queries = range(first, min(first + TILE, length))
        found: list[list[int]] = [[], []]
        for page in range(-(-length // 16)):
            seen = [SEES[kind](at, key) and key < length for key in range(page * 16, page * 16 + 16) for at in queries]
            if any(seen):
                found[all(seen)].append(table[page])
        for (number, pages), expected in zip((task.partly, task.wholly), found, strict=True):
            assert pages[0, 0, i, : number[0, 0, i]].tolist() == expected


def test_reasons_for_refusal() -> None:
    backend, device = FlexAttention(), DeviceInfo("cpu", "cpu")
    assert backend.can_run(NEED, device) is None
    assert "mla" in (backend.can_run(replace(NEED, mla=True), device) or "")
    assert "multiple" in (backend.can_run(replace(NEED, num_q_heads=5), device) or "")
    assert "causal" in (backend.can_run(replace(NEED, causal=False, alibi=True), device) or "")


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_caches_of_eight_bits_are_refused_by_name(kv_dtype: str) -> None:
    """On a GPU its kernel reads the cache where it lies, and knows of no scales there."""
    request = AttentionRequest(need=replace(NEED, kv_dtype=kv_dtype), dtype="float32")
    found = consider(PluginHost(switches=Switches()), request, "flex")
    assert found.chosen is None
    assert ("kv-dtype", kv_dtype) in {(r.code, r.offered) for c in found.candidates for r in c.reasons}


# ------------------------------------------------------------------------------------------------------------ compiled


def compiled() -> FlexAttention:
    """For the CPU: of every shape apart, since torch 2.13 cannot compile it for several there."""
    backend = FlexAttention()
    backend.kernel = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    return backend


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch by torch
@pytest.mark.parametrize("extra", [{}, {"window": 130, "softcap": 8.0, "alibi": True}], ids=["causal", "everything"])
def test_the_kernel_reads_the_pages_where_they_lie(extra: dict) -> None:
    torch._dynamo.reset()
    rows = Rows(compiled(), replace(NEED, head_dim=64, **extra), num_rows=3, length=300)
    close(rows, [(0, 5), (1, 190)], [(0, 1), (1, 1), (2, 33)])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch by torch
def test_a_page_too_few_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the lists are what the kernel reads."""
    torch._dynamo.reset()
    rows = Rows(compiled(), replace(NEED, head_dim=64), num_rows=1, length=300)
    listed = FlexPlanner._list
    monkeypatch.setattr(FlexPlanner, "_list", lambda self, count, pages: listed(self, count - (count > 1), pages))
    with pytest.raises(AssertionError):
        close(rows, [(0, 190)])
