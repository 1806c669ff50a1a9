"""The library of native kernels, through ctypes: operators over raw pointers, run at once or recorded on a tape.

No torch here: the probe loads the library too. How to add a kernel: `docs/cpu.md`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_char_p, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from threading import local
from typing import Any

from lmkit.api import ConfigError, PluginError

MAX_PHASES = 6  # as in csrc/lk.h
ISAS = ("portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")  # worst to best, as in csrc/lk.h
DTYPES = {"torch.float32": 0, "torch.bfloat16": 1, "torch.float16": 2}  # how arguments name them
MISSING = (
    "the native kernels are not there (no compiler when the plugin was installed): everything runs on torch's "
    "operators, with decoding at about half the speed and without graphs"
)
FIX = "install g++ or clang, then: pip install --no-build-isolation --no-deps -e plugins/platforms/cpu"


class Args(ctypes.Structure):
    """Base of every operator's arguments; `chunks[i]` is how many chunks phase i has."""

    _fields_ = [("chunks", c_int64 * MAX_PHASES)]


class Op(ctypes.Structure):
    _fields_ = [
        ("name", c_char_p),
        ("args_size", c_int64),
        ("num_phases", c_int64),
        ("run", c_void_p * MAX_PHASES),
    ]


class Phase(ctypes.Structure):
    _fields_ = [("run", c_void_p), ("args", c_void_p), ("chunks", c_void_p)]


class Tape:
    """Operators recorded one after another; `run` executes all of them in one call.

    The tape keeps the arguments; tensors whose addresses are in them are kept by who recorded it.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._steps: list[tuple[Op, Args, int]] = []
        self._phases: Any = None

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, op: Op, args: Args, chunks: int) -> None:
        self._steps.append((op, args, chunks))
        self._phases = None

    def run(self) -> None:
        if self._phases is None:
            phases = [
                Phase(op.run[i], ctypes.addressof(args), chunks + 8 * i)
                for op, args, chunks in self._steps
                for i in range(op.num_phases)
            ]
            self._phases = (Phase * len(phases))(*phases)
        self._library.lk_run(self._phases, len(self._phases))


class Native:
    """The loaded library. One per process, like its pool of threads and its instruction set."""

    def __init__(self, path: Path) -> None:
        self._library = library = ctypes.CDLL(str(path))
        library.lk_isa_name.restype = c_char_p
        library.lk_find.argtypes, library.lk_find.restype = [c_char_p], ctypes.POINTER(Op)
        library.lk_start.argtypes = [c_int, ctypes.POINTER(c_int), c_int]
        library.lk_run.argtypes, library.lk_run.restype = [c_void_p, c_int64], None
        library.lk_run_op.argtypes, library.lk_run_op.restype = [c_void_p, c_void_p, c_void_p], None
        self._run_op = library.lk_run_op
        self._ops: dict[str, tuple[Op, int]] = {}
        self._recording = local()

    def can(self, isa: str) -> bool:
        """Whether the library and this processor have an instruction set."""
        return isa in ISAS and bool(self._library.lk_has_isa(ISAS.index(isa)))

    @property
    def isas(self) -> tuple[str, ...]:
        """The instruction sets that the library and this processor have, worst to best; "auto" takes the last."""
        return tuple(name for name in ISAS if self.can(name))

    @property
    def isa(self) -> str:
        return ISAS[self._library.lk_isa()]

    def set_isa(self, name: str) -> None:
        """The instruction set from now on; "auto" = the best. Raises ConfigError for one that is not here."""
        name = self.isas[-1] if name == "auto" else name
        if not self.can(name):
            fix = f"one of: auto, {', '.join(self.isas)}"
            raise ConfigError(f"instruction set {name!r} cannot be used here", fix=fix)
        self._library.lk_set_isa(ISAS.index(name))
        self._ops.clear()

    @property
    def threads(self) -> int:
        return int(self._library.lk_threads())

    def start(self, threads: int, cpus: Sequence[int] = ()) -> None:
        """Number of threads, the caller's included. The others run on `cpus` only (none given: anywhere)."""
        if threads < 1 or self._library.lk_start(threads, (c_int * len(cpus))(*cpus), len(cpus)):
            raise ConfigError(f"a pool of {threads} threads cannot be started")

    def has(self, name: str) -> bool:
        return bool(self._library.lk_find(name.encode()))

    def run(self, name: str, args: Args, chunks: int = 0) -> None:
        """Runs an operator, or records it inside `capture`. `chunks`: address of its chunk counts, if not in `args`.

        Arguments are trusted: whoever fills them in checks shapes and dtypes first.
        """
        op, address = self._ops.get(name) or self._find(name, args)
        chunks = chunks or ctypes.addressof(args)
        tape: Tape | None = getattr(self._recording, "tape", None)
        if tape is None:
            self._run_op(address, ctypes.addressof(args), chunks)
        else:
            tape.add(op, args, chunks)

    @property
    def capturing(self) -> bool:
        return getattr(self._recording, "tape", None) is not None

    @contextmanager
    def capture(self) -> Iterator[Tape]:
        """Within it operators of this thread are recorded on the tape, and not run."""
        assert not self.capturing, "a capture within a capture"
        self._recording.tape = tape = Tape(self._library)
        try:
            yield tape
        finally:
            self._recording.tape = None

    def _find(self, name: str, args: Args) -> tuple[Op, int]:
        pointer = self._library.lk_find(name.encode())
        if not pointer:
            raise PluginError(f"the native library has no operator {name!r}", fix=FIX)
        op = pointer.contents
        if op.args_size != ctypes.sizeof(args):
            raise PluginError(
                f"operator {name!r} of the native library takes {op.args_size} bytes of arguments, "
                f"{type(args).__name__} has {ctypes.sizeof(args)}: the library is of another version",
                fix=FIX,
            )
        found = self._ops[name] = (op, ctypes.addressof(op))
        return found


@cache
def load() -> Native | None:
    """The library that was built with this plugin; None where there is none, or it does not load."""
    for path in sorted(Path(__file__).parent.glob("_native*.*")):
        if path.suffix in (".so", ".dylib", ".pyd"):
            try:
                return Native(path)
            except (OSError, AttributeError):  # built for another system, or cut short
                return None
    return None


def doctor() -> str | None:
    """Health check: whether the native kernels are there and run."""
    native = load()
    if native is None:
        return f"{MISSING}; {FIX}"
    return None


def own_processor_flags() -> tuple[str, ...]:
    """Device flags: "native" when the library is there, and "native_ISA" for each instruction set it can use here."""
    native = load()
    return ("native", *(f"native_{name}" for name in native.isas)) if native is not None else ()


def cores(root: Path = Path("/")) -> list[int]:
    """One logical processor of each physical core this process may use, if some core has several; else none."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    allowed = sorted(os.sched_getaffinity(0))
    firsts: dict[str, int] = {}
    for cpu in allowed:
        path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            firsts.setdefault(path.read_text(), cpu)
        except OSError:
            return []
    return list(firsts.values()) if len(firsts) < len(allowed) else []
