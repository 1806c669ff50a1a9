"""BlockTable: the KV blocks of one request. The only way blocks are held and given back."""

from __future__ import annotations

from collections.abc import Sequence

from lmkit.scheduling.groups import FullGroup


class BlockTable:
    """Append-only while it lives: entry i of each group holds positions [i * size, (i + 1) * size), its block size.

    A dropped entry becomes 0 here; workers keep the old id, which they never read again.
    """

    __slots__ = ("blocks", "capacity", "drop_at", "groups", "sent")

    def __init__(self, groups: Sequence[FullGroup]) -> None:
        self.groups = groups
        self.blocks: list[list[int]] = [[] for _ in groups]
        self.capacity = 0  # positions
        self.sent = 0  # positions for which the workers have blocks already
        self.drop_at = min(g.drop_at(0) for g in groups)  # from this position on something can be dropped

    def adopt(self, hits: Sequence[Sequence[int]]) -> None:
        """Start with cached blocks (0 where a group does not need one)."""
        for group, mine, found in zip(self.groups, self.blocks, hits, strict=True):
            assert not mine, "adopt comes first"
            group.pool.touch(block for block in found if block)
            mine.extend(found)
        self.capacity = self.held()

    def held(self) -> int:
        """Positions that every group has blocks for."""
        return min(len(mine) * group.block_size for group, mine in zip(self.groups, self.blocks, strict=True))

    def reserve(self, start: int, n: int) -> bool:
        """Room for positions [start, start + n), none before `start` to be computed again. False: nothing was taken."""
        if start >= self.drop_at:
            self._drop(start)
        if start + n <= self.capacity:
            return True
        needs = []
        for group, mine in zip(self.groups, self.blocks, strict=True):
            need = -(-(start + n) // group.block_size) - len(mine)
            if need > len(group.pool.free):
                return False
            needs.append(need)
        for group, mine, need in zip(self.groups, self.blocks, needs, strict=True):
            mine.extend(group.pool.take(need))
        self.capacity = self.held()
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
        tail = [mine[-(-self.sent // group.block_size) :] for group, mine in zip(self.groups, self.blocks, strict=True)]
        self.sent = self.capacity
        return tail

    def release(self) -> None:
        """Give everything back. Calling it again does nothing."""
        for group, mine in zip(self.groups, self.blocks, strict=True):
            group.pool.release([block for block in mine if block])
            mine.clear()
        self.capacity = self.sent = 0
