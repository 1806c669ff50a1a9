"""The block table of a step, kept from step to step: what reaches the device is what the rows hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit.api import NewRow, SamplingParams, StepPlan
from lmkit_testing.toy import ToyPlatform
from lmkit_worker import tables
from lmkit_worker.rows import RowTable
from lmkit_worker.tables import StepTable

ROWS, WIDE = 5, 9


class Twin:
    """A buffer of two tensors."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.host, self.device = (torch.full(shape, 77, dtype=dtype) for _ in range(2))

    def push(self, n: int) -> torch.Tensor:
        self.device[:n].copy_(self.host[:n])
        return self.device[:n]


class Twins(ToyPlatform):
    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Twin:
        return Twin(shape, dtype)


def new(id: str, blocks: list[int]) -> NewRow:
    return NewRow(id, 0, [0], 1, [blocks], 0, SamplingParams())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("platform", [Twins(), ToyPlatform()], ids=["two tensors", "one tensor"])
@pytest.mark.parametrize("cells", [1, 6, 16384])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_device_has_the_blocks_of_every_row(platform, cells: int, data: st.DataObject) -> None:
    """Rows come, grow, leave and change places; some steps nobody reads; some have rows that stand for nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "CELLS", cells)
        rows = RowTable(ROWS, 64, [WIDE])
        table = StepTable(rows, 0, platform)
        fresh = iter(range(1, 10_000))
        address = table.device.data_ptr()
        for step in range(data.draw(st.integers(1, 12))):
            living = sorted(rows.slot_of)
            gone = data.draw(st.lists(st.sampled_from(living), unique=True)) if living else []
            left = [id for id in living if id not in gone]
            room = {id: WIDE - int(rows.num_blocks[0, rows.slot_of[id]]) for id in left}
            grown = [(id, [[next(fresh) for _ in range(data.draw(st.integers(0, min(3, room[id]))))]]) for id in left]
            entering = [
                new(f"{step}.{i}", [next(fresh) for _ in range(data.draw(st.integers(1, WIDE)))])
                for i in range(data.draw(st.integers(0, ROWS - len(left))))
            ]
            rows.apply(StepPlan(step, gone=gone, new=entering, grown=grown))
            if not rows.slot_of:
                continue
            order = data.draw(st.permutations(sorted(rows.slot_of)))
            slots = np.array([rows.slot_of[id] for id in order[: data.draw(st.integers(1, len(order)))]])
            table.fill(slots)
            end = data.draw(st.integers(len(slots), ROWS))
            table.pad(len(slots), end)
            assert table.host.data_ptr() == table.array.ctypes.data
            for where in (table.host, table.push(end)) if data.draw(st.booleans()) else (table.host,):
                for row, slot in enumerate(slots.tolist()):
                    blocks = rows.row_blocks(0, slot)
                    assert where[row, : len(blocks)].tolist() == blocks.tolist()
                assert where[len(slots) : end, 0].tolist() == [0] * (end - len(slots))
        assert table.device.data_ptr() == address


def test_what_nobody_read_is_sent_with_a_smaller_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that reads the host alone for a step, then fewer rows, then all of them, unchanged."""
    monkeypatch.setattr(tables, "CELLS", 1)
    rows = RowTable(ROWS, 64, [WIDE])
    table = StepTable(rows, 0, Twins())
    rows.apply(StepPlan(0, new=[new(str(i), [10 * i + 1, 10 * i + 2]) for i in range(ROWS)]))
    slots = np.arange(ROWS)
    table.fill(slots)
    table.fill(slots[:2])
    table.push(2)
    table.fill(slots)
    assert table.push(ROWS)[:, :2].tolist() == [[10 * i + 1, 10 * i + 2] for i in range(ROWS)]
