"""Decode steps without Python: the forward pass recorded once per number of rows, then replayed in one native call."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lmkit.api import StepInputs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lmkit_platform_cpu.moves import MOVES
from lmkit_platform_cpu.native import Native, Tape

log = logging.getLogger("lmkit.platform.cpu")

MAX_ROWS = 64  # larger steps spend their time in kernels, not between them
MAX_THEN_ROWS = 4  # likewise of what follows a forward pass; its results, logits, are large
ALIGNMENT = 64

aten = torch.ops.aten
ALLOCATIONS = {
    aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default, aten.new_empty_strided.default,
    aten.empty_like.default,
}  # fmt: skip


class NotCapturable(Exception):
    """The forward pass does something that a tape cannot hold."""


class Memory:
    """Memory of the tensors made within a capture: given back when the last of their views is gone, never freed.

    So tensors of one tape share memory exactly as they did when it was recorded, and nobody else gets it.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}

    def empty(self, shape: Any, dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with arbitrary content."""
        size = max(1, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        free = self._free.setdefault(-(-size // ALIGNMENT) * ALIGNMENT, [])
        block = free.pop() if free else _aligned(-(-size // ALIGNMENT) * ALIGNMENT)
        lent = block[:size]  # torch holds this object as long as the storage lives
        weakref.finalize(lent, free.append, block)
        return torch.from_numpy(lent).view(dtype)[: int(np.prod(shape, dtype=np.int64))].view(*shape)


def _aligned(size: int) -> np.ndarray:
    whole = np.empty(size + ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % ALIGNMENT
    return whole[start : start + size]


class Recorder(TorchDispatchMode):
    """Lets views and allocations through, and records what moves rows; anything else that would compute ends the
    capture."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch's own switch. Nothing is compiled here, and the guard against it would import the compiler (1 s)."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:  # some copy where they must (reshape, to): what these are made of is looked at
            with self:
                made = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if made is NotImplemented else made
        if func in ALLOCATIONS:
            like = func(*args, **{**kwargs, "device": "meta"})
            if like.is_contiguous():
                return self.memory.empty(like.shape, like.dtype)
        if func in MOVES:
            with self:  # what it allocates is the capture's
                made = MOVES[func](*args, **kwargs)
            if made is not None:
                return made
        raise NotCapturable(f"{func} has no native kernel")


@dataclass(slots=True)
class Graph:
    """A tape with what it returns and the tensors that it reads."""

    tape: Tape
    output: Any
    memory: Memory
    inputs: list[Any]

    def run(self) -> Any:
        self.tape.run()
        return self.output


class CpuGraphs:
    """Captures steps that StepInputs declares as capturable; all others run directly.

    Every tensor that a step's inputs hold has the same address in each step of the same number of rows: the buffers
    of the input builder and of the planners, and the KV cache. What differs is in them.
    """

    sizes: Sequence[int] = ()

    def __init__(self, native: Native, max_rows: int) -> None:
        self.native, self.max_rows = native, min(max_rows, MAX_ROWS)
        self.graphs: dict[tuple[object, ...], Graph] = {}  # by what runs, where it reads, and how much
        self.followers: dict[tuple[object, ...], Graph | None] = {}  # likewise, of `then`; None: cannot be captured
        self.outputs: set[int] = set()  # addresses of what graphs return
        self.refused: str | None = None  # why the model cannot be captured, once that is known

    def num_rows(self, n: int) -> int:
        return n

    def run(self, forward: Callable[[StepInputs], Tensor], x: StepInputs) -> Tensor:
        num_rows = x.token_ids.shape[0]
        if not x.capture or num_rows > self.max_rows or self.refused is not None:
            return forward(x)
        if x.adapters is not None:  # their products have no native kernel
            return forward(x)
        entering = x.token_ids if x.embeds is None else x.embeds
        lengths = num_rows, len(x.logits_rows)
        key = (forward, entering.data_ptr(), x.positions.data_ptr(), *(p.slots.data_ptr() for p in x.attn), *lengths)
        graph = self.graphs.get(key)
        if graph is None:
            try:
                inputs = [x.token_ids, x.embeds, x.positions, *x.attn, *x.kv]
                graph = self.graphs[key] = self._capture(forward, x, inputs)
            except NotCapturable as e:
                self.refused = str(e)
                log.info("decode steps run operator by operator: %s", e)
                return forward(x)
            self.outputs.add(graph.output.data_ptr())
        return graph.run()

    def then(self, function: Callable[[Tensor], Any], hidden: Tensor) -> Any:
        """Recorded as a step is: once its weights have gone through the caches, Python finds nothing there of what it
        needs, and a head takes a quarter of a millisecond before it begins."""
        address = hidden.data_ptr()
        if address not in self.outputs or len(hidden) > MAX_THEN_ROWS:
            return function(hidden)
        key = (function, address, hidden.shape)
        if key not in self.followers:
            try:
                self.followers[key] = self._capture(function, hidden, [hidden])
            except NotCapturable as e:
                self.followers[key] = None
                log.info("what follows decode steps runs operator by operator: %s", e)
        graph = self.followers[key]
        return function(hidden) if graph is None else graph.run()

    def _capture(self, function: Callable[[Any], Any], x: Any, inputs: list[Any]) -> Graph:
        memory = Memory()
        with self.native.capture() as tape, Recorder(memory):
            output = function(x)
        return Graph(tape, output, memory, inputs)
