"""KV kinds: which blocks a request needs, may drop, and may find in the prefix cache.

Layers with the same kind and sizes form a group; each group has its own pool, and each request one row of block ids
per group. Groups that can be found in the prefix cache have the same block size, so block i holds the same positions
everywhere. A recurrent group has one block per request, the state after its last position, whatever its length; what is
found of it are copies, made where prompts had as many tokens as whole blocks hold.
"""

from __future__ import annotations

from collections.abc import Sequence

from lmkit.api import ConfigError, KVConfig
from lmkit.scheduling.blocks import BlockPool

NEVER = 1 << 62  # a position, or number of blocks, that no request reaches


class FullGroup:
    """Every position is read until the request ends."""

    grows = True  # a request needs more blocks as it goes on

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size

    def blocks_needed(self, num_tokens: int, chunk: int) -> int:
        """Most blocks held at once by a request that grows to `num_tokens`, at most `chunk` per step."""
        return -(-num_tokens // self.block_size)

    def droppable(self, num_computed: int) -> int:
        """Number of leading blocks that are not read by positions from `num_computed` on."""
        return 0

    def drop_at(self, dropped: int) -> int:
        """From which `num_computed` on more than `dropped` blocks are droppable."""
        return NEVER

    def hit_length(self, hashes: Sequence[bytes], limit: int) -> int:
        """Largest number of blocks, at most `limit`, whose prefix need not be computed."""
        cached = self.pool.cached
        for i in range(limit):
            if hashes[i] not in cached:
                return i
        return limit

    def found(self, hashes: Sequence[bytes], num_hits: int) -> list[int]:
        """The cached blocks with which a table begins that skips `num_hits` blocks; 0 where one is not read."""
        first = self.droppable(num_hits * self.block_size)
        return [0] * first + [self.pool.cached[digest] for digest in hashes[first:num_hits]]


class WindowGroup(FullGroup):
    """Position p reads [p - window + 1, p]. Blocks further back are dropped; a hit needs only the window before it."""

    def __init__(self, pool: BlockPool, block_size: int, window: int) -> None:
        super().__init__(pool, block_size)
        self.window = window

    def blocks_needed(self, num_tokens: int, chunk: int) -> int:
        span = self.window - 1 + chunk  # read and written in one step, at any alignment
        return min(-(-num_tokens // self.block_size), (span + self.block_size - 2) // self.block_size + 1)

    def droppable(self, num_computed: int) -> int:
        return max(0, num_computed - self.window + 1) // self.block_size

    def drop_at(self, dropped: int) -> int:
        return (dropped + 1) * self.block_size + self.window - 1

    def hit_length(self, hashes: Sequence[bytes], limit: int) -> int:
        cached = self.pool.cached
        end, i = limit, limit  # blocks [i, end) are cached
        while i > self.droppable(end * self.block_size):
            i -= 1
            if hashes[i] not in cached:
                end = i
        return end


class RecurrentGroup(FullGroup):
    """One block of a request, for as long as it runs: zeroed at its start, changed in place by each step.

    It is the state after the last position only. A cached block is a copy under the hash of the last block before it,
    held by nobody; a request that finds it begins with a copy of that.
    """

    grows = False

    def hit_length(self, hashes: Sequence[bytes], limit: int) -> int:
        cached = self.pool.cached
        return next((i for i in range(limit, 0, -1) if hashes[i - 1] in cached), 0)

    def found(self, hashes: Sequence[bytes], num_hits: int) -> list[int]:
        return []


def make_groups(kv: KVConfig) -> list[FullGroup]:
    """One group per KVSpec. Raises ConfigError for a kind or a mix of block sizes that cannot be scheduled."""
    sizes = {spec.block_size for spec in kv.specs if not spec.recurrent}
    if len(sizes) > 1 or min(spec.block_size for spec in kv.specs) < 1:
        raise ConfigError(f"KV groups need one block size, got {sorted(sizes)}")
    groups: list[FullGroup] = []
    for spec, num_blocks in zip(kv.specs, kv.num_blocks, strict=True):
        if num_blocks < 2:
            raise ConfigError(f"a KV group needs at least 2 blocks (one is the null block), got {num_blocks}")
        pool = BlockPool(num_blocks)
        if spec.kind == "full":
            groups.append(FullGroup(pool, spec.block_size))
        elif spec.kind == "window" and spec.window:
            groups.append(WindowGroup(pool, spec.block_size, spec.window))
        elif spec.recurrent:
            groups.append(RecurrentGroup(pool, spec.block_size))
        else:
            raise ConfigError(f"KV kind {spec.kind!r} (window {spec.window}) cannot be scheduled")
    return groups


def hit_length(groups: Sequence[FullGroup], hashes: Sequence[bytes], limit: int) -> int:
    """Largest number of blocks that every group can skip. Each answer lowers the limit until all agree."""
    lower = limit
    while True:
        for group in groups:
            lower = group.hit_length(hashes, lower)
        if lower == limit:
            return limit
        limit = lower
