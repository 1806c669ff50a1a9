"""Queues of the simulated device: what happens before what, and uses of memory that nothing orders.

Every launch has a number. A queue's clock says for each queue up to which launch all is done before the next of its
own; events carry clocks from queue to queue, and to the host (vector clocks: Fidge and Mattern,
https://doi.org/10.1145/359545.359563). Two uses of the same bytes of which one writes must be ordered, and so must the
last uses of freed memory and whoever gets it next.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import Work

Clock = dict[int, int]  # by number of a queue


class SimError(AssertionError):
    """Something that goes wrong on a real device, perhaps."""


def site() -> str:
    """The innermost line of lmkit's own code, or of a library that drives a device."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if ("lmkit" in name or "flashinfer/" in name) and "lmkit_testing/sim" not in name:
            return f"{name.split('/src/')[-1].split('site-packages/')[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def join(clock: Clock, other: Clock) -> None:
    """`clock` knows of all that `other` knows of."""
    for queue, number in other.items():
        if clock.get(queue, 0) < number:
            clock[queue] = number


class Place(NamedTuple):
    """Bytes [low, high) of the memory that begins at address `base`."""

    base: int
    low: int
    high: int


def place(tensor: Tensor) -> Place:
    span = sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    low = int(tensor.storage_offset()) * tensor.itemsize
    return Place(tensor.untyped_storage().data_ptr(), low, low + span * tensor.itemsize)


class Use(NamedTuple):
    where: Place
    writes: bool


@dataclass(eq=False)
class Block:
    """Memory that was given out in queue `owner`, and the last launch of each queue that used its parts."""

    owner: int
    bytes: np.ndarray
    queues: set[int] = field(default_factory=set)  # that used it
    uses: dict[tuple[int, Use], tuple[int, str]] = field(default_factory=dict)  # number and name of the launch
    shared: set[int] = field(default_factory=set)  # queues that the allocator was told of


class Order:
    """All blocks that lie on the device, or are pinned, and how they were used."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}  # by address
        self.freed: list[Block] = []  # used by other queues than their owner's, which may not be done yet

    def lend(self, block: Block) -> None:
        block.queues.clear()
        block.uses.clear()
        block.shared.clear()
        self.blocks[block.bytes.ctypes.data] = block

    def use(self, used: Use, queue: int, clock: Clock, name: str) -> None:
        """The launch that comes next in `queue` uses this; SimError where an earlier use may not be done."""
        block = self.blocks.get(used.where.base)
        if block is None:
            block = self.blocks[used.where.base] = Block(queue, np.empty(0, np.uint8))
        if block.queues - {queue}:
            for (other, before), (number, by) in block.uses.items():
                apart = before.where.high <= used.where.low or used.where.high <= before.where.low
                if other == queue or apart or not (used.writes or before.writes) or number <= clock.get(other, 0):
                    continue
                what = f"{'writes' if used.writes else 'reads'} what {by} in queue {other} "
                raise SimError(
                    f"{name} in queue {queue} {what}{'writes' if before.writes else 'reads'}, and waits for no event "
                    f"behind it, at {site()}"
                )
        block.queues.add(queue)
        block.uses[queue, used] = clock[queue], name

    def settled(self, queue: int, clock: Clock, host: Clock) -> list[Block]:
        """Freed blocks of `queue` that may be given out again, once each. One that another queue may still use, of
        which the allocator was not told, is a SimError: it could be the one that is given out now."""
        mine = [block for block in self.freed if block.owner == queue]
        ready = [block for block in mine if self._ready(block, clock, host)]
        self.freed = [block for block in self.freed if block not in ready]
        return ready

    @staticmethod
    def _ready(block: Block, clock: Clock, host: Clock) -> bool:
        done = True
        for (other, _), (number, by) in block.uses.items():
            if other in block.shared:  # the allocator asks an event
                done &= number <= host.get(other, 0)
            elif other != block.owner and number > clock.get(other, 0):
                raise SimError(
                    f"memory of queue {block.owner} was freed while {by} in queue {other} may still use it: "
                    f"record_stream, or an event before it is freed, is missing; at {site()}"
                )
        return done


def uses(reads: Iterable[Any], writes: Iterable[Any]) -> list[Use]:
    """What is used of tensors on the CPU that stand for memory of the device, or are pinned."""
    found = [Use(place(t), False) for t in reads if isinstance(t, Tensor) and t.numel()]
    return found + [Use(place(t), True) for t in writes if isinstance(t, Tensor) and t.numel()]


def tree_leaves(tree: Any) -> list[Any]:
    """What is in tuples, lists and dicts. torch's own function leaves cycles behind, which would hold tensors."""
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    return [leaf for part in tree for leaf in tree_leaves(part)] if isinstance(tree, (tuple, list)) else [tree]


def called(func: Any, operands: Any, inner: Any) -> Any:
    """What ranks do together is over then: it runs in threads of its own, which the device would wait for."""
    result = func(*operands, **inner)
    if func.namespace == "c10d":
        for work in (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.ScriptObject)):
            Work.unbox(work).wait()
    return result
