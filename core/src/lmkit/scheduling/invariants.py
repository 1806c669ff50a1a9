"""What is always true between calls of the scheduler. Run when idle, and after every step in tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lmkit.scheduling.groups import NEVER, FullGroup
from lmkit.scheduling.hashes import block_hash, media_bytes
from lmkit.scheduling.queue import OrderedQueue
from lmkit.scheduling.request import Request


def check_books(
    requests: Mapping[str, Request],
    waiting: OrderedQueue,
    running: OrderedQueue,
    groups: Sequence[FullGroup],
    gone: Sequence[str],
    max_rows: int,
) -> None:
    """Raises AssertionError naming the broken invariant. `gone`: rows that the workers are still to forget."""
    waiting.check()
    running.check()
    queued = [*waiting, *running]
    assert len(queued) == len(requests), "a request is in both queues or in none"
    assert all(requests.get(r.id) is r for r in queued), "queues and requests differ"
    assert len(running) <= max_rows, "more running requests than rows"
    assert len(set(gone)) == len(gone), "a row is to be forgotten twice"
    for r in waiting:
        _check_waiting(r)
    for r in running:
        _check_running(groups, r)
    for i, group in enumerate(groups):
        group.pool.check(r.held.blocks[i] for r in running)


def _check_waiting(r: Request) -> None:
    held = (r.table, r.resident, r.num_computed, r.num_inflight, r.num_unverified, r.num_published, r.drafts)
    assert not any(held), f"waiting request {r.id} owns something"


def _check_running(groups: Sequence[FullGroup], r: Request) -> None:
    table, size = r.held, groups[0].block_size
    held = [len(blocks) * group.block_size for group, blocks in zip(groups, table.blocks, strict=True)]
    assert r.resident, f"running request {r.id} has no row"
    assert r.num_computed <= len(r.tokens) + r.num_inflight + r.num_unverified, f"{r.id} computed too much"
    assert table.capacity == min(held), f"{r.id}: capacity differs from blocks"
    assert r.num_computed <= table.capacity, f"{r.id} computed outside its blocks"
    paged = [len(blocks) for group, blocks in zip(groups, table.blocks, strict=True) if group.grows]
    assert len(set(paged)) <= 1, f"{r.id}: groups have different lengths"
    assert all(group.grows or len(b) == 1 for group, b in zip(groups, table.blocks, strict=True)), f"{r.id}: states"
    assert table.sent == table.capacity, f"{r.id}: blocks were not sent"
    known = min(r.num_computed, len(r.tokens))
    assert r.num_published == NEVER or r.num_published * size <= known, f"{r.id} published what is not known"
    for group, blocks in zip(groups, table.blocks, strict=True):
        first = group.droppable(r.num_computed - r.num_unverified)
        last = -(-r.num_computed // group.block_size)
        assert all(blocks[first:last]), f"{r.id} lost a block that it still reads"
    parent = r.root_hash
    assert len(r.block_hashes) * size <= len(r.tokens), f"{r.id} hashed what is not known"
    for i, digest in enumerate(r.block_hashes):
        start, end = i * size, (i + 1) * size
        parent = block_hash(parent, r.tokens[start:end], media_bytes(r.media, start, end))
        assert digest == parent, f"{r.id}: hash of block {i} differs from its content"
