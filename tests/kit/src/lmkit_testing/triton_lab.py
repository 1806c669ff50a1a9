"""A laboratory for Triton kernels: the interpreter with right numbers, and with an eye on memory.

    with lab(unwritten=("out",)) as seen:
        kernel[grid](x, out, ...)
    assert seen.moved <= 1.05 * floor

Within it an access outside of the kernel's arguments, one program writing where another reads or writes, a read of
what nobody wrote, and an output that was left unwritten, are Faults; and the bytes that a launch moves are counted, in
sectors of 32, as a GPU's memory moves them.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from lmkit_testing.triton_numbers import right_numbers

SECTOR = 32  # bytes


class Fault(AssertionError):
    """What a kernel does wrong with memory."""


class Region:
    """The memory of one argument: who wrote and who read each `unit` of bytes. Programs count from 1; 0 is nobody."""

    def __init__(self, name: str, tensor: torch.Tensor, unwritten: bool) -> None:
        self.name, self.tensor, self.first = name, tensor, tensor.data_ptr()
        span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1 if tensor.numel() else 0
        self.size = span * tensor.element_size()
        self.unwritten, self.unit = unwritten, tensor.element_size()

    def begin(self, others: list[Region]) -> None:
        """Nobody was here. Units are elements; where arguments lie in the same memory, those of the smallest."""
        near = [r for r in others if r.first < self.first + self.size and self.first < r.first + r.size]
        self.unit = min((r.tensor.element_size() for r in near), default=self.unit)
        self.writer = np.zeros(self.size // self.unit, np.int32)
        self.reader = np.zeros(self.size // self.unit, np.int32)  # -1: several
        self.fresh = np.full(self.size // self.unit, self.unwritten)

    @property
    def inside(self) -> np.ndarray:
        """Which units belong to elements: a view has gaps."""
        each, found = self.tensor.element_size() // self.unit, np.zeros(self.size // self.unit, bool)
        starts = np.zeros(1, np.int64)
        for n, stride in zip(self.tensor.shape, self.tensor.stride(), strict=True):
            starts = (starts[:, None] + np.arange(n) * stride * each).ravel()
        if self.tensor.numel():
            found[(starts[:, None] + np.arange(each)).ravel()] = True
        return found

    def units(self, at: np.ndarray, size: int) -> np.ndarray:
        """Those of elements of `size` bytes at addresses."""
        found = thinned((at - self.first) // self.unit)
        return found if size <= self.unit else (found[:, None] + np.arange(size // self.unit)).ravel()


def thinned(numbers: np.ndarray) -> np.ndarray:
    """Without those that stand behind their equals, as neighbours in a tile do."""
    return numbers[np.r_[True, numbers[1:] != numbers[:-1]]]


@dataclass
class Seen:
    """What the launches within a laboratory did. Bytes of sectors: `moved` counts each once per launch."""

    unwritten: Collection[str]
    regions: list[Region] = field(default_factory=list)
    launches: int = 0
    moved: int = 0
    requested: int = 0  # bytes of the elements that were asked for
    touched: int = 0  # bytes of the sectors of all accesses, each time
    program: int = 0
    _sectors: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))
    _filled: set[int] = field(default_factory=set)  # addresses of what a launch before has had

    @property
    def efficiency(self) -> float:
        """Share of what accesses fetch that was asked for: 1 for neighbours, 1/8 for every eighth float."""
        return self.requested / max(1, self.touched)

    def begin(self, arguments: dict[str, Any]) -> None:
        self.regions = [
            Region(name, tensor, name in self.unwritten and tensor.data_ptr() not in self._filled)
            for name, tensor in arguments.items() if isinstance(tensor, torch.Tensor)
        ]  # fmt: skip
        for region in self.regions:
            region.begin(self.regions)
        self._sectors = (set(), set())

    def end(self) -> None:
        self.launches += 1
        self._filled.update(region.first for region in self.regions)
        self.moved += SECTOR * sum(map(len, self._sectors))
        for region in self.regions:
            if region.fresh.any() and (left := region.fresh & region.inside).any():
                at = int(left.argmax()) * region.unit // region.tensor.element_size()
                count = int(left.sum()) * region.unit
                raise Fault(f"{region.name}: {count} bytes were left unwritten, first at [{at}]")

    def access(self, pointers: np.ndarray, mask: np.ndarray, size: int, write: bool, atomic: bool = False) -> None:
        """Elements of `size` bytes at `pointers` where `mask`."""
        wanted = np.broadcast_to(mask, np.shape(pointers)).ravel().astype(bool)
        at = np.ascontiguousarray(pointers).ravel()[wanted].astype(np.int64)
        if not at.size:
            return
        outside, low, high = np.ones(at.size, bool), int(at.min()), int(at.max())
        for region in self.regions:
            if high < region.first or low >= region.first + region.size:
                continue
            inside = (at >= region.first) & (at + size <= region.first + region.size)
            if inside.any():
                outside &= ~inside
                units = region.units(at if inside.all() else at[inside], size)
                (self._write if write else self._read)(region, units, atomic)
        if outside.any():
            raise Fault(
                f"out of bounds: program {self.program - 1} {'writes' if write else 'reads'} {int(outside.sum())} "
                f"elements outside every argument, first at {self._nearest(int(at[outside][0]))}"
            )
        if (at % size).any():
            raise Fault(
                f"program {self.program - 1} reaches for {size} bytes at {self._nearest(int(at[0]))}, misaligned"
            )
        sectors = np.unique(thinned(at // SECTOR))
        self.requested += at.size * size
        self.touched += SECTOR * len(sectors)
        self._sectors[write].update(sectors.tolist())

    def _write(self, region: Region, at: np.ndarray, atomic: bool) -> None:
        if not atomic:
            self._refuse(region.writer[at], f"writes {region.name} where program {{}} writes, too")
            self._refuse(region.reader[at], f"writes {region.name} where program {{}} reads")
            region.writer[at] = self.program
        region.fresh[at] = False

    def _read(self, region: Region, at: np.ndarray, atomic: bool) -> None:
        if region.fresh[at].any():
            raise Fault(f"program {self.program - 1} reads {region.name} where nobody wrote")
        self._refuse(region.writer[at], f"reads {region.name} where program {{}} writes")
        before = region.reader[at]
        region.reader[at] = np.where((before == 0) | (before == self.program), self.program, -1)

    def _refuse(self, who: np.ndarray, what: str) -> None:
        others = who[(who != 0) & (who != self.program)]
        if others.size:
            other = "another" if others[0] < 0 else str(int(others[0]) - 1)
            raise Fault(f"race: program {self.program - 1} " + what.format(other).replace("program another", "another"))

    def _nearest(self, address: int) -> str:
        def distance(region: Region) -> int:
            return min(abs(address - region.first), abs(address - region.first - region.size))

        region = min(self.regions, key=distance)
        size = region.tensor.element_size()
        return f"{region.name}[{(address - region.first) // size}] (it has {region.size // size})"


@contextlib.contextmanager
def mutant(user: ModuleType, old: str, new: str, folder: Path) -> Iterator[None]:
    """`user.kernels` with `new` in place of `old`: a fault put in on purpose, which tests must find."""
    source = Path(user.kernels.__file__).read_text(encoding="utf-8")
    assert old in source, f"the kernels have no {old!r} any more"
    file = folder / "kernels.py"
    file.write_text(source.replace(old, new), encoding="utf-8")
    spec = spec_from_file_location(f"mutant_{abs(hash((old, new)))}", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    with patch.object(user, "kernels", module):
        yield


@contextlib.contextmanager
def lab(*, unwritten: Collection[str] = (), shuffle: int | None = None) -> Iterator[Seen]:
    """Watches every launch of an interpreted kernel. `unwritten`: arguments that hold nothing yet and must be filled.

    `shuffle`: a seed for the order of programs, which is no promise on a GPU; None keeps it.
    """
    import triton.runtime.interpreter as interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    seen = Seen(unwritten)
    load, store = builder.create_masked_load, builder.create_masked_store
    rmw, index, init, call = builder.create_atomic_rmw, builder.set_grid_idx, executor._init_args_hst, executor.__call__

    def size_of(pointers: Any) -> int:
        return max(1, pointers.get_element_ty().primitive_bitwidth // 8)

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        seen.access(pointers.data, mask.data, size_of(pointers), write=False)
        return load(self, pointers, mask, *rest)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        seen.access(pointers.data, mask.data, size_of(pointers), write=True)
        return store(self, pointers, value, mask, *rest)

    def watched_rmw(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        seen.access(pointers.data, mask.data, size_of(pointers), write=True, atomic=True)
        return rmw(self, op, pointers, value, mask, *rest)

    orders: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}

    def shuffled(self: Any, x: int, y: int, z: int) -> None:
        nx, ny, nz = self.grid_dim
        if shuffle is not None:
            if (nx, ny, nz) not in orders:
                order = [(a, b, c) for a in range(nx) for b in range(ny) for c in range(nz)]
                random.Random(shuffle).shuffle(order)
                orders[nx, ny, nz] = order
            x, y, z = orders[nx, ny, nz][(x * ny + y) * nz + z]
        index(self, x, y, z)
        seen.program = 1 + x + nx * (y + ny * z)

    def begun(self: Any, arguments: Any, named: Any) -> Any:
        host, host_named = init(self, arguments, named)
        seen.begin({**dict(zip(self.arg_names, host, strict=False)), **host_named})
        return host, host_named

    def launched(self: Any, *arguments: Any, **named: Any) -> Any:
        try:
            call(self, *arguments, **named)
        except interpreter.InterpreterError as error:
            cause: BaseException | None = error
            while isinstance(cause, interpreter.InterpreterError):  # one for each function that a kernel calls
                cause = cause.__cause__
            if isinstance(cause, Fault):
                raise cause from None
            raise
        seen.end()

    patches = [
        (builder, "create_masked_load", watched_load), (builder, "create_masked_store", watched_store),
        (builder, "create_atomic_rmw", watched_rmw), (builder, "set_grid_idx", shuffled),
        (executor, "_init_args_hst", begun), (executor, "__call__", launched),
    ]  # fmt: skip
    with right_numbers(), contextlib.ExitStack() as undo:
        for owner, name, patch in patches:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, patch)
        yield seen
