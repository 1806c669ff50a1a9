"""Blocks: the memory of the cache, as plans copy and clear it: all layers of a group at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch
from lmkit.api import KVConfig, PluginError, StepPlan

from lmkit_worker.buffers import ArrayBuffer

if TYPE_CHECKING:
    from lmkit.api import AttentionBackend, AttnNeed, LayerInfo, Platform
    from torch import Tensor

AT_ONCE = 1 << 26  # bytes: what lies between reading and writing of blocks that are copied together
IDS = 512  # block ids that travel together
ALIGNMENT = 16  # bytes: where the states of a row begin


class Blocks:
    """The cache of a model: for attention, a tensor [layers, *kv_shape] per KV group; of recurrent layers, [blocks,
    bytes], in which a block has the states of all layers side by side.

    Copies of a step are one reading and one writing, whatever the number of blocks and layers, as long as they are not
    larger than AT_ONCE.
    """

    def __init__(
        self, kv: KVConfig, layers: Sequence[LayerInfo], needs: Sequence[AttnNeed],
        backends: Sequence[AttentionBackend], platform: Platform, device: torch.device,
    ) -> None:  # fmt: skip
        """`needs` and `backends`: one per KV group of attention layers. PluginError where a backend's shape is not what
        was planned."""
        self.kv: list[Tensor] = [torch.empty(0, device=device)] * len(layers)  # by layer; empty without attention
        self.state: list[Mapping[str, Tensor]] = []  # by layer, if any is recurrent
        self.paged: list[Tensor] = []  # by group of attention layers: [layers, *kv_shape]
        self._memory: list[tuple[Tensor, int]] = []  # by group, with the axis of blocks
        paged = [(spec, num) for spec, num in zip(kv.specs, kv.num_blocks, strict=True) if not spec.recurrent]
        for (spec, num), need, backend in zip(paged, needs, backends, strict=True):
            shape = backend.kv_shape(need, num)
            axis = _block_axis(backend, shape, backend.kv_shape(need, num - 1), num)
            # Not cleared: pages of the host are then taken as they fill, and nobody reads what was not written.
            memory = torch.empty((len(spec.layers), *shape), dtype=getattr(torch, spec.dtype), device=device)
            if memory.nbytes != spec.bytes_per_block * num:
                raise PluginError(
                    f"attention {backend.name}: the KV of a group takes {memory.nbytes} bytes, "
                    f"{spec.bytes_per_block * num} are planned"
                )
            self.paged.append(memory)
            for layer, tensor in zip(spec.layers, memory, strict=True):
                self.kv[layer] = tensor
            if memory.itemsize == 1:  # torch copies numbers of 8 bits by index as integers only
                memory = memory.view(torch.uint8)
            self._memory.append((memory.unflatten(axis + 1, (num, -1)), axis + 1))
        if kv.specs[-1].recurrent:
            width = -(-kv.specs[-1].bytes_per_block // ALIGNMENT) * ALIGNMENT
            memory = torch.empty((kv.num_blocks[-1], width), dtype=torch.uint8, device=device)
            self.state = _states(memory, layers)
            self._memory.append((memory, 0))
        self._ids = ArrayBuffer(platform.buffer((IDS,), torch.int64))

    def read(self, saves: Sequence[tuple[int, int]]) -> list[Tensor]:
        """The content of blocks (group, block) as it is now: uint8 [blocks, bytes] on the device, in their order."""
        parts = []
        for group, found in groupby(saves, key=lambda save: save[0]):
            memory, axis = self._memory[group]
            blocks = [block for _, block in found]
            for first in range(0, len(blocks), IDS):
                part = memory.index_select(axis, self._push(blocks[first : first + IDS])).movedim(axis, 0)
                parts.append(part.contiguous().view(len(part), -1).view(torch.uint8))
        return parts

    def _load(self, loads: Sequence[tuple[int, int, bytes]]) -> None:
        """Writes blocks as `read` gave them."""
        for group, found in groupby(loads, key=lambda load: load[0]):
            memory, axis = self._memory[group]
            whole, these = memory.movedim(axis, 0), list(found)
            for first in range(0, len(these), IDS):
                part = these[first : first + IDS]
                content = torch.frombuffer(bytearray().join(load[2] for load in part), dtype=torch.uint8)
                content = content.view(memory.dtype).view(len(part), *whole.shape[1:])
                whole.index_copy_(0, self._push([block for _, block, _ in part]), content.to(memory.device))

    def apply(self, plan: StepPlan) -> None:
        """Loads, copies, then clears what the plan says, in its order."""
        self._load(plan.loads)
        for group, copies in groupby(plan.copies, key=lambda copy: copy[0]):
            memory, axis = self._memory[group]
            for pairs in _together([(source, target) for _, source, target in copies], self._most(group) // 2):
                sources, targets = self._push(np.array(pairs).T.ravel()).chunk(2)
                memory.index_copy_(axis, targets, memory.index_select(axis, sources))
        for group, cleared in groupby(sorted(plan.zero), key=lambda block: block[0]):
            memory, axis = self._memory[group]
            blocks = [block for _, block in cleared]
            for first in range(0, len(blocks), IDS):
                memory.index_fill_(axis, self._push(blocks[first : first + IDS]), 0)

    def poison(self, group: int, blocks: Iterable[int]) -> None:
        """Fills blocks with bytes of ones: NaN in every floating type, and in scales of integers."""
        memory, axis = self._memory[group]
        for block in blocks:
            part = memory.select(axis, block)
            part.fill_(torch.nan if part.is_floating_point() else 255)

    def _most(self, group: int) -> int:
        """Ids of sources and targets that go together, two for each copy."""
        memory, axis = self._memory[group]
        return 2 * max(1, min(IDS // 2, AT_ONCE * memory.shape[axis] // max(1, memory.nbytes)))

    def _push(self, ids: Sequence[int] | np.ndarray) -> Tensor:
        self._ids.array[: len(ids)] = ids
        return self._ids.push(len(ids))


def _together(copies: Sequence[tuple[int, int]], most: int) -> Iterator[list[tuple[int, int]]]:
    """Copies (source, target) in parts of at most `most`, in which none reads or writes what one before it wrote."""
    part: list[tuple[int, int]] = []
    written: set[int] = set()
    for source, target in copies:
        if len(part) == most or not written.isdisjoint((source, target)):
            yield part
            part, written = [], set()
        part.append((source, target))
        written.add(target)
    if part:
        yield part


def _block_axis(backend: AttentionBackend, shape: tuple[int, ...], smaller: tuple[int, ...], num: int) -> int:
    """The axis of `shape` that has a span for each of `num` blocks; `smaller` is the shape with one block less."""
    axes = [i for i, (a, b) in enumerate(zip(shape, smaller, strict=True)) if a != b]
    if len(axes) != 1 or shape[axes[0]] % num:
        raise PluginError(f"attention {backend.name}: kv_shape must have one axis proportional to num_blocks")
    return axes[0]


def _states(memory: Tensor, layers: Sequence[LayerInfo]) -> list[Mapping[str, Tensor]]:
    """The state tensors of each layer, by name: views of `memory` [slots, bytes]. Larger numbers come first, so that
    all are aligned."""
    found: list[dict[str, Tensor]] = [{} for _ in layers]
    wanted = [(getattr(torch, t.dtype), layer, t) for layer, info in enumerate(layers) for t in info.state]
    at = 0
    for dtype, layer, t in sorted(wanted, key=lambda x: -x[0].itemsize):
        part = memory[:, at : (at := at + dtype.itemsize * int(np.prod(t.shape)))]
        found[layer][t.name] = part.view(dtype).view(-1, *t.shape)
    assert memory.shape[1] - at in range(ALIGNMENT), "the state of a row is as large as planned"
    return list(found)
