"""Faults put into scheduling on purpose; the trials must find each of them. No production code knows of this."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from lmkit.engine import intake
from lmkit.scheduling import groups, hashes, invariants, scheduler
from lmkit.scheduling.blocks import BlockPool
from lmkit.scheduling.groups import FullGroup, WindowGroup
from lmkit.scheduling.scheduler import Scheduler
from lmkit.scheduling.table import BlockTable

Patches = list[tuple[object, str, object]]  # owner, attribute, replacement


def full_hit() -> Patches:
    """A hit may cover the whole prompt: nothing is left to compute."""

    def find(self, r):
        limit = len(r.tokens) // self.block_size
        return groups.hit_length(self.groups, hashes.extend_hashes(r, limit, self.block_size), limit), b""

    return [(Scheduler, "_find", find)]


def hash_without_parent() -> Patches:
    """A block is named by its own tokens only."""
    real = hashes.block_hash
    mine = lambda parent, tokens, media=b"": real(b"", tokens, media)  # noqa: E731
    return [(hashes, "block_hash", mine), (invariants, "block_hash", mine)]


def hash_without_root() -> Patches:
    """Tenants and adapters share blocks."""
    return [(intake, "root_hash", lambda *parts: b"")]


def revived_not_counted() -> Patches:
    """Cached blocks that are free count as free and as hits."""
    return [(BlockPool, "num_revived", lambda self, blocks: 0)]


def evicted_stays_cached() -> Patches:
    """A block that is taken again is still found under its old content."""

    def take(self, n):
        blocks = [self.free.popitem(last=False)[0] for _ in range(n)]
        for block in blocks:
            self.ref[block] = 1
        return blocks

    return [(BlockPool, "take", take)]


def null_block_taken() -> Patches:
    """Block 0 is handed out like any other."""
    real = BlockPool.__init__

    def init(self, num_blocks):
        real(self, num_blocks)
        self.free[0] = None

    return [(BlockPool, "__init__", init)]


def shared_block_freed() -> Patches:
    """Releasing frees a block although another table holds it."""

    def release(self, blocks):
        for block in blocks:
            self.ref[block] = 0
            self.free[block] = None

    return [(BlockPool, "release", release)]


def blocks_leak() -> Patches:
    """A released table keeps its last block."""

    def release(self):
        for group, mine in zip(self.groups, self.blocks, strict=True):
            group.pool.release([block for block in mine[:-1] if block])
            mine.clear()
        self.capacity = self.sent = 0

    return [(BlockTable, "release", release)]


def rejected_drafts_stay() -> Patches:
    """Rejected drafts count as computed."""
    real = Scheduler._accept

    def accept(self, r, row, tokens, event):
        before = r.num_computed
        real(self, r, row, tokens, event)
        if r.table is not None:
            r.num_computed = before

    return [(Scheduler, "_accept", accept)]


def drafts_published() -> Patches:
    """Blocks that hold drafts become findable under the text the drafts would make."""
    real = Scheduler._seal

    def seal(self, plan, long, r, n):
        guess = r.tokens + r.drafts
        real(self, plan, long, r, n)
        size, num_whole = self.block_size, r.num_computed // self.block_size
        if self.limits.prefix_cache and len(guess) > len(r.tokens):
            parent = r.root_hash
            for i in range(num_whole):
                parent = hashes.block_hash(parent, guess[i * size : (i + 1) * size])
                for group, blocks in zip(self.groups, r.table.blocks, strict=True):
                    if blocks[i] and group.pool.hashes[blocks[i]] is None:
                        group.pool.publish(blocks[i], parent)

    return [(Scheduler, "_seal", seal)]


def epoch_stays() -> Patches:
    """Results of a row that was preempted count for its successor."""
    real = Scheduler._preempt

    def preempt(self, r):
        epoch = r.epoch
        real(self, r)
        r.epoch = epoch

    return [(Scheduler, "_preempt", preempt)]


def counters_survive_preemption() -> Patches:
    """A resumed request believes in tokens in flight that nobody will send."""
    real = Scheduler._preempt

    def preempt(self, r):
        num_inflight = r.num_inflight
        real(self, r)
        r.num_inflight = num_inflight

    return [(Scheduler, "_preempt", preempt)]


def gone_is_not_said() -> Patches:
    """Workers never hear that a row is gone."""
    real = Scheduler._vacate

    def vacate(self, r):
        real(self, r)
        self._gone.clear()

    return [(Scheduler, "_vacate", vacate)]


def first_is_the_victim() -> Patches:
    """The oldest running request is preempted instead of the youngest."""
    real = Scheduler._preempt
    return [(Scheduler, "_preempt", lambda self, r: real(self, self.running.items[0]))]


def grown_blocks_lost() -> Patches:
    """Workers hear only of the last new block."""
    real = BlockTable.unsent

    def unsent(self):
        first = self.sent == 0
        tail = real(self)
        return tail if first else [mine[-1:] for mine in tail]

    return [(BlockTable, "unsent", unsent)]


def window_too_narrow() -> Patches:
    """A block that still holds the first position of the window is dropped."""
    narrow = lambda self, n: max(0, n - self.window + 2) // self.block_size  # noqa: E731
    at = lambda self, dropped: (dropped + 1) * self.block_size + self.window - 2  # noqa: E731
    return [(WindowGroup, "droppable", narrow), (WindowGroup, "drop_at", at)]


def window_ignored_in_hits() -> Patches:
    """A hit in a window group needs only its last block."""

    def hit_length(self, found, limit):
        while limit and found[limit - 1] not in self.pool.cached:
            limit -= 1
        return limit

    return [(WindowGroup, "hit_length", hit_length)]


def groups_disagree() -> Patches:
    """The first group alone decides how long a hit is."""

    def first_only(all_groups, found, limit):
        return all_groups[0].hit_length(found, limit)

    return [(groups, "hit_length", first_only), (scheduler, "hit_length", first_only)]


def any_size_accepted() -> Patches:
    """Requests that cannot fit alone are accepted."""
    real = FullGroup.blocks_needed
    return [
        (FullGroup, "blocks_needed", lambda self, n, chunk: min(real(self, n, chunk), self.pool.num_usable)),
        (WindowGroup, "blocks_needed", lambda self, n, chunk: 0),
    ]


def min_tokens_ignored() -> Patches:
    """Any stop token ends the request, however short."""

    def finish_reason(r, token, eos):
        if (token in eos and not r.params.ignore_eos) or token in r.params.stop_token_ids:
            return "stop"
        return "length" if len(r.tokens) >= r.max_length else None

    return [(scheduler, "finish_reason", finish_reason)]


def stop_after_length() -> Patches:
    """The length is looked at before the stop tokens."""
    real = scheduler.finish_reason
    return [
        (scheduler, "finish_reason", lambda r, t, eos: "length" if len(r.tokens) >= r.max_length else real(r, t, eos))
    ]


def cache_survives_lost_step() -> Patches:
    """Content that was never computed stays findable."""
    return [(BlockPool, "forget_since", lambda self, step: None)]


def fault_stays_cached() -> Patches:
    """What a faulty row wrote stays findable."""
    return [(Scheduler, "_distrust", lambda self: None)]


def gates_ignored() -> Patches:
    """Closed gates let requests pass."""
    return [(Scheduler, "_gates_open", lambda self, r: True)]


def scored_twice() -> Patches:
    """Prompt logprobs come again after a preemption."""

    def add_logprobs(self, r, found, event):
        event.logprobs = found.tokens[: len(event.tokens)]
        event.prompt_logprobs = found.prompt

    return [(Scheduler, "_add_logprobs", add_logprobs)]


def scored_from_cache() -> Patches:
    """Requests that want prompt logprobs skip cached positions."""
    return [(Scheduler, "_may_hit", lambda self, r: self.limits.prefix_cache)]


def budget_ignored() -> Patches:
    """A first chunk is as long as the prompt."""
    real = Scheduler._start
    return [(Scheduler, "_start", lambda self, r, budget: real(self, r, len(r.tokens)))]


def state_not_zeroed() -> Patches:
    """A new row goes on with the state that the row before left behind."""
    real = Scheduler.schedule

    def schedule(self):
        plan = real(self)
        plan.zero.clear()
        return plan

    return [(Scheduler, "schedule", schedule)]


def state_survives_preemption() -> Patches:
    """A resumed request computes only what came after, as if its state were still there."""
    real = Scheduler._start

    def start(self, r, budget):
        n = real(self, r, budget)
        if n and self.zeroed and r.started.num_preempted:
            r.num_computed = min(n, len(r.tokens)) - 1
        return n and n - r.num_computed

    return [(Scheduler, "_start", start)]


def state_grows() -> Patches:
    """A request takes another state for every few tokens."""
    real = groups.RecurrentGroup.__init__
    return [(groups.RecurrentGroup, "__init__", lambda self, pool, size: real(self, pool, 8))]


def states_not_copied() -> Patches:
    """A state is said to be kept, or restored, and is not."""
    real = Scheduler.schedule

    def schedule(self):
        plan = real(self)
        plan.copies.clear()
        return plan

    return [(Scheduler, "schedule", schedule)]


def state_kept_late() -> Patches:
    """The state that is kept has seen more tokens than its hash tells."""
    real = Scheduler._keep_state

    def keep(self, plan, r, n):
        passed = r.num_computed
        r.num_computed = max((place for place in r.keep_at if place <= passed), default=passed)
        real(self, plan, r, n)
        r.num_computed = passed
        return n

    return [(Scheduler, "_keep_state", keep), (Scheduler, "_up_to_kept", lambda self, r, start, n: n)]


def steps_of_the_same_rows() -> Patches:
    """Steps in flight need not have rows of their own."""
    real = Scheduler.__init__

    def init(self, limits, *args, **options):
        real(self, limits, *args, **options)
        self.limits = replace(limits, apart=False)

    return [(Scheduler, "__init__", init)]


def capacity_overstated() -> Patches:
    """A table believes to have one position more than its blocks hold."""
    real = BlockTable.reserve

    def reserve(self, start, n):
        return start + n == self.capacity + 1 > 1 or real(self, start, n)

    return [(BlockTable, "reserve", reserve)]


MUTANTS: Mapping[str, Callable[[], Patches]] = {
    f.__name__: f
    for f in (
        full_hit, hash_without_parent, hash_without_root, revived_not_counted, evicted_stays_cached, null_block_taken,
        shared_block_freed, blocks_leak, rejected_drafts_stay, drafts_published, epoch_stays,
        counters_survive_preemption, gone_is_not_said, first_is_the_victim, grown_blocks_lost, window_too_narrow,
        window_ignored_in_hits, groups_disagree, any_size_accepted, min_tokens_ignored, stop_after_length,
        cache_survives_lost_step, fault_stays_cached, gates_ignored, scored_twice,
        scored_from_cache, budget_ignored, state_not_zeroed, state_survives_preemption, state_grows,
        states_not_copied, state_kept_late, capacity_overstated,
        steps_of_the_same_rows,
    )
}  # fmt: skip


@contextmanager
def applied(name: str) -> Iterator[None]:
    """The mutant lives while the context does."""
    patches = [patch.object(owner, attribute, replacement) for owner, attribute, replacement in MUTANTS[name]()]
    for p in patches:
        p.start()
    try:
        yield
    finally:
        for p in reversed(patches):
            p.stop()
