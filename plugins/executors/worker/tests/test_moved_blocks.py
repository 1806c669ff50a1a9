"""Blocks leave one cache and come into another: every byte, in every layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit.api import AttnNeed, KVConfig, KVSpec, LayerInfo, StepPlan
from lmkit_testing.toy import ToyPlatform
from lmkit_worker.blocks import IDS, Blocks


class BlocksFirst:
    name = "blocks first"

    def kv_shape(self, need: AttnNeed, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, need.num_kv_heads, need.block_size * 2 * need.head_dim)


class BlocksWithin:
    """Keys before values, and the places of a block side by side with those of others."""

    name = "blocks within"

    def kv_shape(self, need: AttnNeed, num_blocks: int) -> tuple[int, ...]:
        return (2, need.num_kv_heads, num_blocks * need.block_size, need.head_dim)


def cache(layout: type, dtype: str, num_blocks: int) -> Blocks:
    need = AttnNeed(2, 2, 4, kv_dtype=dtype, block_size=4)
    size = torch.empty(0, dtype=getattr(torch, dtype)).itemsize
    spec = KVSpec(
        kind="full", layers=(0, 1, 2), block_size=4, num_kv_heads=2, head_dim=4, dtype=dtype,
        bytes_per_block=3 * 2 * 2 * 4 * 4 * size,
    )  # fmt: skip
    layers = [LayerInfo(i, need) for i in range(3)]
    return Blocks(KVConfig((spec,), (num_blocks,)), layers, [need], [layout()], ToyPlatform(), torch.device("cpu"))


def contents(blocks: Blocks, ids: list[int]) -> list[bytes]:
    return [row.tobytes() for part in blocks.read([(0, i) for i in ids]) for row in part.numpy()]


@settings(max_examples=30, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("layout", [BlocksFirst, BlocksWithin])
def test_what_was_read_is_loaded_elsewhere(layout: type, dtype: str, data: st.DataObject) -> None:
    """Into other places of a cache of another size; blocks beside them stay as they were."""
    giver, taker = cache(layout, dtype, 20), cache(layout, dtype, 30)
    for each in (giver, taker):
        raw = each.paged[0].view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
    sources = data.draw(st.lists(st.integers(1, 19), unique=True, min_size=1))
    targets = data.draw(st.permutations(range(1, 30)))[: len(sources)]
    before = contents(taker, list(range(30)))
    moved = contents(giver, sources)
    assert all(len(one) == 3 * 2 * 2 * 4 * 4 * giver.paged[0].itemsize for one in moved)
    taker.apply(StepPlan(1, loads=[(0, target, one) for target, one in zip(targets, moved, strict=True)]))
    want = dict(enumerate(before)) | dict(zip(targets, moved, strict=True))
    assert contents(taker, list(range(30))) == [want[i] for i in range(30)]


def test_more_than_go_together() -> None:
    giver = cache(BlocksFirst, "float32", 2 * IDS + 9)
    giver.paged[0].copy_(torch.randn(giver.paged[0].shape))
    ids = list(range(1, 2 * IDS + 9))
    moved = contents(giver, ids)
    giver.apply(StepPlan(1, loads=[(0, i, one) for i, one in zip(reversed(ids), moved, strict=True)]))
    assert contents(giver, ids[::-1]) == moved
