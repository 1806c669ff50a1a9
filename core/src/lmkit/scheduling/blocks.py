"""BlockPool: who uses each KV block, which free block is reused next, and which content is findable.

A free block keeps its content and stays findable through `cached` until it is taken again. Block 0 is the null block:
never taken, never written, the table entry of what was dropped.

Invariants (checked by `check`): free, referenced and null blocks add up; `ref[b]` is the number of tables that hold b;
`free` is exactly the blocks with ref 0; `cached` is the inverse of `hashes` and `parts` together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Blocks of one KV group. `free` is in order of eviction: anonymous first, then least recently used."""

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` includes the null block."""
        self.num_blocks = num_blocks
        self.ref = [0] * num_blocks
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.cached: dict[bytes, int] = {}
        self.parts: dict[int, bytes] = {}  # block -> digest of what it held before it was full
        self.step = 0  # the latest that was planned
        self.evicted: list[tuple[bytes, int, int]] | None = None  # digest, block, when published; None: nobody asks
        self._published = [0] * num_blocks  # the latest step planned when a block was published

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    def take(self, n: int) -> list[int]:
        """`n` blocks with undefined content. The caller has made sure that so many are free."""
        free, hashes, ref = self.free, self.hashes, self.ref
        blocks = []
        for _ in range(n):
            block, _ = free.popitem(last=False)
            digest = hashes[block]
            if digest is not None and self.evicted is not None:
                self.evicted.append((digest, block, self._published[block]))
            self._forget(digest)
            self._forget(self.parts.pop(block, None))
            hashes[block] = None
            ref[block] = 1
            blocks.append(block)
        return blocks

    def _forget(self, digest: bytes | None) -> None:
        if digest is not None:
            del self.cached[digest]

    def touch(self, blocks: Iterable[int]) -> None:
        """One more table holds each of `blocks` (a prefix hit)."""
        for block in blocks:
            if self.ref[block] == 0:
                del self.free[block]
            self.ref[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One table less holds each of `blocks`, given head first: tails are reused before heads."""
        for block in reversed(blocks):
            self.ref[block] -= 1
            assert self.ref[block] >= 0, f"block {block} released more often than taken"
            if self.ref[block] == 0:
                self.free[block] = None
                if self.hashes[block] is None and block not in self.parts:
                    self.free.move_to_end(block, last=False)

    def num_revived(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are free: touching them uses up free blocks."""
        return sum(self.ref[block] == 0 for block in blocks)

    def publish(self, block: int, digest: bytes) -> bool:
        """Make a block findable. False: a second block of equal content stays anonymous, so that it is reused first."""
        if digest in self.cached:
            return False
        assert self.hashes[block] is None, f"block {block} has a name"
        self.cached[digest] = block
        self.hashes[block] = digest
        self._published[block] = self.step
        return True

    def publish_part(self, block: int, digest: bytes) -> None:
        """Make a block findable by what it holds so far: it keeps that when more is written behind."""
        if digest not in self.cached:
            self._forget(self.parts.pop(block, None))
            self.cached[digest] = block
            self.parts[block] = digest
            self._published[block] = self.step

    def keep(self, digest: bytes) -> int:
        """A free block, findable at once and held by nobody: whoever asks fills it before it can be read."""
        blocks = self.take(1)
        self.publish(blocks[0], digest)
        self.release(blocks)
        return blocks[0]

    def renew(self, digest: bytes) -> int:
        """The block with that content, as if used just now."""
        block = self.cached[digest]
        self.touch([block])
        self.release([block])
        return block

    def forget_since(self, step: int = 0) -> None:
        """What was published once `step` was planned is found no more: it may be of that step, or of a later one."""
        for digest, block in list(self.cached.items()):
            if self._published[block] >= step:
                del self.cached[digest]
                self.hashes[block] = None
                self.parts.pop(block, None)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """`tables`: the block ids of every live table of this group."""
        ref = [0] * self.num_blocks
        for table in tables:
            held = [block for block in table if block]
            assert len(set(held)) == len(held), "a block stands twice in one table"
            for block in held:
                ref[block] += 1
        assert ref == self.ref, "ref differs from the number of tables"
        assert sorted(self.free) == [b for b in range(1, self.num_blocks) if ref[b] == 0], (
            "free queue differs from ref 0"
        )
        named = {digest: block for block, digest in enumerate(self.hashes) if digest is not None}
        named |= {digest: block for block, digest in self.parts.items()}
        assert self.cached == named, "cached and names are not inverse"
        assert self.hashes[0] is None, "the null block was published"
