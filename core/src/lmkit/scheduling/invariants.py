"""What is always true between calls of the scheduler. Run when idle, and after every step in tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkit.scheduling.groups import NEVER
from lmkit.scheduling.hashes import block_hash, media_bytes

if TYPE_CHECKING:
    from lmkit.scheduling.request import Request
    from lmkit.scheduling.scheduler import Scheduler


def check_scheduler(s: Scheduler) -> None:
    """Raises AssertionError naming the broken invariant."""
    s.waiting.check()
    s.running.check()
    queued = [*s.waiting, *s.running]
    assert len(queued) == len(s.requests), "a request is in both queues or in none"
    assert all(s.requests.get(r.id) is r for r in queued), "queues and requests differ"
    assert len(s.running) <= s.limits.max_rows, "more running requests than rows"
    assert len(set(s._gone)) == len(s._gone), "a row is to be forgotten twice"
    for r in s.waiting:
        _check_waiting(r)
    for r in s.running:
        _check_running(s, r)
    for i, group in enumerate(s.groups):
        group.pool.check(r.held.blocks[i] for r in s.running)


def _check_waiting(r: Request) -> None:
    held = (r.table, r.resident, r.num_computed, r.num_inflight, r.num_unverified, r.num_published, r.drafts)
    assert not any(held), f"waiting request {r.id} owns something"


def _check_running(s: Scheduler, r: Request) -> None:
    table, size = r.held, s.block_size
    held = [len(blocks) * group.block_size for group, blocks in zip(s.groups, table.blocks, strict=True)]
    assert r.resident, f"running request {r.id} has no row"
    assert r.num_computed <= len(r.tokens) + r.num_inflight + r.num_unverified, f"{r.id} computed too much"
    assert table.capacity == min(held), f"{r.id}: capacity differs from blocks"
    assert r.num_computed <= table.capacity, f"{r.id} computed outside its blocks"
    paged = [len(blocks) for group, blocks in zip(s.groups, table.blocks, strict=True) if group.grows]
    assert len(set(paged)) <= 1, f"{r.id}: groups have different lengths"
    assert all(group.grows or len(b) == 1 for group, b in zip(s.groups, table.blocks, strict=True)), f"{r.id}: states"
    assert table.sent == table.capacity, f"{r.id}: blocks were not sent"
    known = min(r.num_computed, len(r.tokens))
    assert r.num_published == NEVER or r.num_published * size <= known, f"{r.id} published what is not known"
    for group, blocks in zip(s.groups, table.blocks, strict=True):
        first = group.droppable(r.num_computed - r.num_unverified)
        last = -(-r.num_computed // group.block_size)
        assert all(blocks[first:last]), f"{r.id} lost a block that it still reads"
    parent = r.root_hash
    assert len(r.block_hashes) * size <= len(r.tokens), f"{r.id} hashed what is not known"
    for i, digest in enumerate(r.block_hashes):
        start, end = i * size, (i + 1) * size
        parent = block_hash(parent, r.tokens[start:end], media_bytes(r.media, start, end))
        assert digest == parent, f"{r.id}: hash of block {i} differs from its content"
