"""RowTable: the worker's mirror of the scheduler's rows, changed only by the diffs in StepPlan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from lmkit.api import EngineError, NewRow, StepPlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmkit.api import PoolingParams, SamplingParams


UNREAD = -1


class RowTable:
    """Rows in fixed slots: a row keeps its slot while it lives, so nothing moves when others come and go.

    All per-row data are preallocated numpy arrays indexed by slot; building a step gathers from them. The lowest free
    slot is taken first, so equal plans give equal slots on every rank.
    """

    def __init__(self, max_rows: int, max_length: int, max_blocks: Sequence[int]) -> None:
        """`max_length`: tokens of one row, drafts included; `max_blocks`: blocks of one row, per KV group."""
        self.max_rows = max_rows
        self.slot_of: dict[str, int] = {}  # id -> slot
        self.ids: list[str | None] = [None] * max_rows
        self.params: list[SamplingParams | None] = [None] * max_rows
        self.pooling: list[PoolingParams | None] = [None] * max_rows
        self.epoch = np.zeros(max_rows, np.int64)
        # Prompt and accepted output, then this step's drafts. UNREAD: drawn, and still on the device.
        self.tokens = np.zeros((max_rows, max_length), np.int32)
        self.num_tokens = np.zeros(max_rows, np.int64)  # drafts excluded
        self.num_unread = np.zeros(max_rows, np.int64)
        self.turn = np.zeros(max_rows, np.int64)  # counts the rows that the slot has had
        self.num_prompt = np.zeros(max_rows, np.int64)
        self.second = np.zeros(max_rows, np.int64)  # first position of token type 1; 0 = none
        self.table = [np.zeros((max_rows, n), np.int32) for n in max_blocks]  # block ids per KV group
        self.num_blocks = np.zeros((len(max_blocks), max_rows), np.int64)
        self._free = list(range(max_rows - 1, -1, -1))  # descending, so that pop() takes the lowest

    def __len__(self) -> int:
        return len(self.slot_of)

    def apply(
        self,
        plan: StepPlan,
        removed: Callable[[int], None] = lambda slot: None,
        added: Callable[[int, NewRow], None] = lambda slot, row: None,
    ) -> None:
        """Applies gone, new, grown, in this order. `removed` and `added` are told of each slot that changes hands."""
        if plan.gone:
            for id in plan.gone:
                removed(self._remove(id))
            self._free.sort(reverse=True)
        for row in plan.new:
            added(self._add(row), row)
        for id, blocks in plan.grown:
            self._grow(self.slot_of[id], blocks)

    def clear(self) -> None:
        """Forgets all rows."""
        for id in list(self.slot_of):
            self._remove(id)
        self._free.sort(reverse=True)

    def _remove(self, id: str) -> int:
        slot = self.slot_of.pop(id)
        self.ids[slot] = self.params[slot] = self.pooling[slot] = None
        self.num_tokens[slot] = self.num_unread[slot] = self.num_prompt[slot] = self.second[slot] = 0
        self.turn[slot] += 1
        self.num_blocks[:, slot] = 0
        self._free.append(slot)
        return slot

    def _add(self, row: NewRow) -> int:
        if row.id in self.slot_of:
            raise EngineError(f"plan adds row {row.id!r} twice")
        if not self._free:
            raise EngineError(f"plan has more than {self.max_rows} rows")
        slot = self._free.pop()
        self.slot_of[row.id] = slot
        self.ids[slot], self.params[slot], self.epoch[slot] = row.id, row.params, row.epoch
        if row.pooling is not None:
            self.pooling[slot], self.second[slot] = row.pooling, row.pooling.second
        n = len(row.tokens)
        self.tokens[slot, :n] = row.tokens
        self.num_tokens[slot], self.num_prompt[slot] = n, row.num_prompt_tokens
        self._grow(slot, row.blocks)
        return slot

    def _grow(self, slot: int, blocks: Sequence[Sequence[int]]) -> None:
        for group, ids in enumerate(blocks):
            if ids:
                n = self.num_blocks[group, slot]
                self.table[group][slot, n : n + len(ids)] = ids
                self.num_blocks[group, slot] = n + len(ids)

    def expect(self, slots: np.ndarray) -> None:
        """One token for each of `slots` [S], which is not known yet."""
        ends = self.num_tokens[slots]
        self.tokens[slots, ends] = UNREAD
        self.num_tokens[slots] = ends + 1
        self.num_unread[slots] += 1

    def read(self, slots: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> None:
        """What the tokens expected at `positions` [S] of `slots` [S] are: `tokens` [S]."""
        self.tokens[slots, positions] = tokens
        self.num_unread[slots] -= 1

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        """Several accepted tokens of one row."""
        n = self.num_tokens[slot]
        self.tokens[slot, n : n + len(tokens)] = tokens
        self.num_tokens[slot] = n + len(tokens)

    def put_drafts(self, slot: int, drafts: Sequence[int]) -> None:
        """Writes drafts behind the known tokens; the next append overwrites them."""
        n = self.num_tokens[slot]
        self.tokens[slot, n : n + len(drafts)] = drafts

    def row_tokens(self, slot: int) -> np.ndarray:
        """All tokens known of a row: a view."""
        return self.tokens[slot, : self.num_tokens[slot]]

    def room(self, slots: np.ndarray, block_sizes: np.ndarray) -> np.ndarray:
        """Places [R] that rows in `slots` [R] have blocks for in each KV group, whose block sizes [G] are given."""
        return (self.num_blocks[: len(block_sizes), slots] * block_sizes[:, None]).min(0)

    def row_blocks(self, group: int, slot: int) -> np.ndarray:
        """Block ids of a row in a KV group: a view."""
        return self.table[group][slot, : self.num_blocks[group, slot]]

    def check(self, live: Iterable[str] | None = None) -> None:
        """Invariants; AssertionError naming the broken one. `live`: ids that must be exactly the rows."""
        slots = sorted(self.slot_of.values())
        for slot in slots:
            assert (self.row_tokens(slot) == UNREAD).sum() == self.num_unread[slot], (
                f"slot {slot} counts what is unread"
            )
        assert sorted(slots + self._free) == list(range(self.max_rows)), "each slot is free or taken, once"
        for id, slot in self.slot_of.items():
            assert self.ids[slot] == id, f"slot {slot} belongs to {self.ids[slot]}, not {id}"
            assert 0 < self.num_prompt[slot] <= self.num_tokens[slot], f"row {id} has a prompt"
        if live is not None:
            assert set(live) == set(self.slot_of), "rows mirrored equal rows of the scheduler"
