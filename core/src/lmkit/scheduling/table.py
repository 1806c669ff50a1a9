"""BlockTable: the KV blocks of one request. The only way blocks are held and given back."""

from __future__ import annotations

from collections.abc import Sequence

from lmkit.scheduling.groups import FullGroup


class BlockTable:
    """Append-only while it lives: entry i of each group holds positions [i * block_size, (i + 1) * block_size).

    A dropped entry becomes 0 here; workers keep the old id, which they never read again.
    """

    __slots__ = ("block_size", "blocks", "capacity", "drop_at", "groups", "num_sent")

    def __init__(self, groups: Sequence[FullGroup]) -> None:
        self.groups = groups
        self.block_size = groups[0].block_size
        self.blocks: list[list[int]] = [[] for _ in groups]  # per group, all of one length
        self.capacity = 0  # positions
        self.num_sent = 0  # entries the workers already have
        self.drop_at = min(g.drop_at(0) for g in groups)  # from this position on something can be dropped

    def __len__(self) -> int:
        return len(self.blocks[0])

    def adopt(self, hits: Sequence[Sequence[int]]) -> None:
        """Start with cached blocks (0 where a group does not need one)."""
        for group, mine, found in zip(self.groups, self.blocks, hits, strict=True):
            assert not mine, "adopt comes first"
            group.pool.touch(block for block in found if block)
            mine.extend(found)
        self.capacity = len(self) * self.block_size

    def reserve(self, start: int, n: int) -> bool:
        """Room for positions [start, start + n), none before `start` to be computed again. False: nothing was taken."""
        if start >= self.drop_at:
            self._drop(start)
        if start + n <= self.capacity:
            return True
        need = -(-(start + n - self.capacity) // self.block_size)
        for group in self.groups:
            if need > len(group.pool.free):
                return False
        for group, mine in zip(self.groups, self.blocks, strict=True):
            mine.extend(group.pool.take(need))
        self.capacity += need * self.block_size
        return True

    def _drop(self, num_computed: int) -> None:
        """Give back what positions from `num_computed` on never read."""
        drop_at = []
        for group, mine in zip(self.groups, self.blocks, strict=True):
            end = begin = min(group.droppable(num_computed), len(mine))
            while begin > 0 and mine[begin - 1]:
                begin -= 1
            group.pool.release(mine[begin:end])
            mine[begin:end] = [0] * (end - begin)
            drop_at.append(group.drop_at(end))
        self.drop_at = min(drop_at)

    def unsent(self) -> list[list[int]]:
        """Entries the workers do not have yet, per group; they count as sent from now on."""
        tail = [mine[self.num_sent :] for mine in self.blocks]
        self.num_sent = len(self)
        return tail

    def release(self) -> None:
        """Give everything back. Calling it again does nothing."""
        for group, mine in zip(self.groups, self.blocks, strict=True):
            group.pool.release([block for block in mine if block])
            mine.clear()
        self.capacity = self.num_sent = 0
