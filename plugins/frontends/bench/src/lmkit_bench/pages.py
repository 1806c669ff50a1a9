"""Rows with scattered blocks and a platform that copies nothing: what a kernel is measured and tested with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lmkit.api import AttnBatch
from torch import Tensor


class PlainBuffer:
    """A Buffer on the CPU: host and device are one tensor."""

    def __init__(self, tensor: Tensor, device: torch.device | str = "cpu") -> None:
        self.host = tensor
        self.device = tensor.to(device)

    def push(self, n: int) -> Tensor:
        self.device[:n].copy_(self.host[:n])
        return self.device[:n]


class PlainPlatform:
    """As much of a Platform as planners and loading need."""

    name = "plain"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.torch_device = torch.device(device)
        self.device_type = self.torch_device.type

    def upload(self, source: Tensor) -> Tensor:
        return source.to(self.torch_device)

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> PlainBuffer:
        return PlainBuffer(torch.zeros(shape, dtype=dtype), self.torch_device)


@dataclass(slots=True)
class PagedRow:
    """A row's length so far and its blocks."""

    length: int = 0
    blocks: list[int] = field(default_factory=list)


class PagedRows:
    """Block tables of rows that grow; blocks are handed out in random order, block 0 never.

    On each device the table of a batch is one and the same, as a worker's.
    """

    def __init__(self, num_rows: int, num_blocks: int, block_size: int, seed: int = 0) -> None:
        self.rows = [PagedRow() for _ in range(num_rows)]
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self._free)
        self._tables: dict[torch.device, PlainBuffer] = {}

    def grow(self, work: Sequence[tuple[int, int]], device: torch.device | str = "cpu") -> AttnBatch:
        """The batch of a step in which `work` = (row, number of new tokens), in batch order; lengths advance."""
        slots: list[int] = []
        starts = [0]
        for index, count in work:
            row = self.rows[index]
            for position in range(row.length, row.length + count):
                if position // self.block_size == len(row.blocks):
                    row.blocks.append(self._free.pop())
                slots.append(row.blocks[position // self.block_size] * self.block_size + position % self.block_size)
            row.length += count
            starts.append(starts[-1] + count)
        used = [self.rows[index] for index, _ in work]
        if (where := torch.device(device)) not in self._tables:
            self._tables[where] = PlainBuffer(torch.empty(len(self.rows), self.num_blocks, dtype=torch.int32), device)
        table = self._tables[where]
        for i, row in enumerate(used):
            table.host[i] = -1  # beyond a row's blocks: never valid
            table.host[i, : len(row.blocks)] = torch.tensor(row.blocks, dtype=torch.int32)

        def buffer(values: Any, dtype: torch.dtype) -> PlainBuffer:
            return PlainBuffer(torch.as_tensor(values, dtype=dtype), device)

        return AttnBatch(
            query_start=buffer(starts, torch.int32),
            seq_len=buffer([r.length for r in used], torch.int32),
            table=table,
            slots=buffer(slots, torch.int64),
            num_rows=len(used),
            num_tokens=starts[-1],
            max_query=max([count for _, count in work], default=0),
            max_seq=max([r.length for r in used], default=0),
            num_decode_rows=next((i for i, (_, count) in enumerate(work) if count != 1), len(work)),
        )


def plain_platform(device: torch.device | str = "cpu") -> Any:
    """A PlainPlatform where a Platform is wanted."""
    return PlainPlatform(device)
