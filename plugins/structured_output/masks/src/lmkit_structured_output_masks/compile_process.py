"""The process in which grammars are compiled: `python -m` this module, frames on stdin and stdout.

A grammar comes from a stranger and may take any time or memory, so each is compiled by a child, forked once the
backends are loaded, under limits of the kernel. New grammars come first: one that takes longer than a moment is
stopped, and starts again behind all others, one at a time. What was compiled is tried out by a short walk, which shows
what it takes and whether it works.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import select
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NoReturn

import msgspec
import numpy as np
from lmkit.api import (
    Choice,
    CompiledGrammar,
    Grammar,
    GrammarBackend,
    GrammarError,
    LmkitError,
    PluginError,
    Vocabulary,
    blame,
    make_target,
)
from lmkit_killable import OUT_OF_MEMORY, Limits, limited, unfinished

HEADER = 4  # bytes of a frame's length, big-endian
MAX_RUNNING = 2  # children at a time, of which one may be slow
WALK = 32  # tokens


class Setup(msgspec.Struct):
    """First frame."""

    pieces: list[bytes]  # this and the next three: the Vocabulary
    special_ids: list[int]
    eos_token_ids: tuple[int, ...]
    size: int
    backends: list[Choice]
    cpu_seconds: int  # for one grammar
    seconds: float  # of the clock for one
    first_seconds: float  # of the clock, before it has to wait for others
    nbytes: int  # of memory beyond what the process has before it
    compiled_bytes: int  # of memory that a compiled grammar keeps
    mask_seconds: float  # of CPU time for one mask


class Job(msgspec.Struct, tag=True):
    id: int
    backends: list[str]  # to be asked in this order
    grammar: Grammar


class Cancel(msgspec.Struct, tag=True):
    """Nobody waits for this job any more; no result follows."""

    id: int


class Result(msgspec.Struct):
    """What `compile` of a backend returned; or why each refused; or why there is no answer."""

    id: int
    backend: str = ""
    compiled: bytes = b""
    nbytes: int = 0  # that it takes when it is loaded
    refused: dict[str, str] = {}
    faults: list[str] = []  # of backends that raised something else: what clients read
    unfinished: str | None = None
    lasting: bool = True  # it would be so next time too


def frame(message: Any) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(HEADER, "big") + payload


def write(stream: BinaryIO, message: Any) -> None:
    stream.write(frame(message))
    stream.flush()


def read(stream: BinaryIO) -> bytes | None:
    """One payload; None at the end."""
    size = stream.read(HEADER)
    return stream.read(int.from_bytes(size, "big")) if len(size) == HEADER else None


@dataclass(slots=True, eq=False)
class Child:
    """A job under way."""

    job: Job
    pid: int
    pipe: int
    slow: bool  # it has had its first moment
    began: float = field(default_factory=time.monotonic)
    data: bytearray = field(default_factory=bytearray)


class Compiling:
    """Jobs waiting and under way."""

    def __init__(self, setup: Setup, sink: BinaryIO) -> None:
        self._setup, self._sink = setup, sink
        self._vocabulary = Vocabulary(setup.pieces, frozenset(setup.special_ids), setup.eos_token_ids, setup.size)
        self._choices = {choice.name: choice for choice in setup.backends}
        self._backends: dict[str, GrammarBackend] = {}
        self._new: deque[Job] = deque()
        self._slow: deque[Job] = deque()  # taken up again when nothing new waits for their place
        self._children: list[Child] = []

    def serve(self, source: int) -> None:
        """Until `source` ends."""
        data = bytearray()
        while True:
            pipes = {child.pipe: child for child in self._children}
            for ready in select.select([source, *pipes], [], [], self._patience())[0]:
                if ready in pipes:
                    self._receive(pipes[ready])
                    continue
                piece = os.read(source, 1 << 20)
                if not piece:
                    return
                data += piece
                self._take_in(data)
            self._watch()
            self._start()

    def close(self) -> None:
        for child in list(self._children):
            self._end(child)

    def _take_in(self, data: bytearray) -> None:
        while len(data) >= HEADER and len(data) >= (end := HEADER + int.from_bytes(data[:HEADER], "big")):
            message = msgspec.msgpack.decode(bytes(data[HEADER:end]), type=Job | Cancel)
            del data[:end]
            if isinstance(message, Job):
                self._new.append(message)
                continue
            for waiting in (self._new, self._slow):
                for job in [job for job in waiting if job.id == message.id]:
                    waiting.remove(job)
            for child in [child for child in self._children if child.job.id == message.id]:
                self._end(child)

    def _patience(self) -> float | None:
        """Seconds until some child has had its time."""
        ends = [child.began + self._limit(child) for child in self._children]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _limit(self, child: Child) -> float:
        return self._setup.seconds if child.slow else self._setup.first_seconds

    def _watch(self) -> None:
        now = time.monotonic()
        for child in [child for child in self._children if now >= child.began + self._limit(child)]:
            if child.slow:
                self._end(child)
                reason = f"no answer within {self._setup.seconds:g} s"
                write(self._sink, Result(child.job.id, unfinished=reason, lasting=False))
            elif any(other.slow for other in self._children):
                self._end(child)
                self._slow.append(child.job)
            else:
                child.slow = True

    def _start(self) -> None:
        while len(self._children) < MAX_RUNNING:
            slow = any(child.slow for child in self._children)
            if self._slow and not slow:
                self._fork(self._slow.popleft(), slow=True)
            elif self._new:
                self._fork(self._new.popleft(), slow=False)
            else:
                return

    def _fork(self, job: Job, *, slow: bool) -> None:
        faults = []
        for name in job.backends:
            if name not in self._backends:
                try:
                    self._backends[name] = make_target(self._choices[name], self._vocabulary)
                except LmkitError as error:
                    faults.append(error.message)
        source, sink = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._compile(job, sink, faults)
        os.close(sink)
        self._children.append(Child(job, pid, source, slow))

    def _compile(self, job: Job, sink: int, faults: list[str]) -> NoReturn:
        """In the child. `faults`: of backends that could not be made."""
        status = 1
        try:
            before = resident()
            result = Result(job.id, faults=faults)
            with limited(self._setup.cpu_seconds, self._setup.nbytes):
                for name in (name for name in job.backends if name in self._backends):
                    backend = self._backends[name]
                    try:
                        result.compiled = backend.compile(job.grammar)
                        loaded = backend.load(result.compiled)
                        try_out(loaded, self._setup.size, self._setup.eos_token_ids, self._setup.mask_seconds)
                        result.backend, result.nbytes = name, kept(before)
                        if result.nbytes > self._setup.compiled_bytes:
                            raise GrammarError(_too_large(result.nbytes, self._setup.compiled_bytes))
                        break
                    except LmkitError as error:
                        result = Result(job.id, refused={**result.refused, name: error.message}, faults=result.faults)
                    except MemoryError:
                        raise
                    except BaseException as error:  # a native library's need not even be an Exception
                        sys.excepthook(*sys.exc_info())
                        fault = blame(error, [self._choices[name]])
                        said = str(fault) if isinstance(fault, PluginError) else type(error).__name__
                        result = Result(job.id, refused=result.refused, faults=[*result.faults, said])
            payload = memoryview(frame(result))
            while payload:
                payload = payload[os.write(sink, payload) :]
            status = 0
        except MemoryError:
            status = OUT_OF_MEMORY
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)

    def _receive(self, child: Child) -> None:
        piece = os.read(child.pipe, 1 << 20)
        child.data += piece
        if piece:
            return
        status = self._end(child, kill=False)
        if status == 0 and len(child.data) >= HEADER:
            self._sink.write(child.data)
            self._sink.flush()
        else:
            limits = Limits(self._setup.cpu_seconds, self._setup.nbytes, self._setup.seconds)
            why = unfinished(status, limits)
            write(self._sink, Result(child.job.id, unfinished=str(why), lasting=why.lasting))

    def _end(self, child: Child, *, kill: bool = True) -> int:
        """The child's status, negative for a signal."""
        self._children.remove(child)
        if kill:
            os.kill(child.pid, signal.SIGKILL)
        os.close(child.pipe)
        return os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])


def _too_large(nbytes: int, limit: int) -> str:
    return f"it would keep {nbytes >> 20} MiB of memory, and {limit >> 20} MiB are possible"


def try_out(grammar: CompiledGrammar, size: int, ends: tuple[int, ...], mask_seconds: float, steps: int = WALK) -> None:
    """A walk over tokens that the masks allow. Raises GrammarError where it comes to harm."""
    matcher, source = grammar.matcher(), random.Random(0)
    row = np.zeros(-(-size // 32), np.int32)
    began = time.thread_time()
    for _ in range(steps):
        if matcher.exhausted:
            return
        row[:] = 0
        before = time.thread_time()
        matcher.fill(row)
        now = time.thread_time()
        if now - before > mask_seconds:
            raise GrammarError(f"a step of it takes more than {mask_seconds:g} s")
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:size])
        allowed = allowed[~np.isin(allowed, ends)]
        if not len(allowed):
            if not matcher.complete:
                raise GrammarError("nothing satisfies it, or it leads to where nothing may follow")
            return
        if matcher.accept([int(allowed[source.randrange(len(allowed))])]) != 1:
            raise GrammarError("it does not take what it allows")
        if now - began > mask_seconds:
            return


def resident() -> int:
    """Bytes of memory of its own that this process has touched; 0 where it is not known."""
    with contextlib.suppress(OSError, ValueError, StopIteration), open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) << 10
    return 0


def kept(before: int) -> int:
    """Growth since `before`, without what was only used on the way."""
    give_back()
    return max(0, resident() - before)


def give_back() -> None:
    """Hands free memory back to the system, where the C library can."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not land between the frames
    source = os.fdopen(0, "rb", buffering=0, closefd=False)
    first = read_exactly(source)
    if first is None:
        return 0
    compiling = Compiling(msgspec.msgpack.decode(first, type=Setup), sink)
    try:
        compiling.serve(0)
    finally:
        compiling.close()
    return 0


def read_exactly(source: Any) -> bytes | None:
    """One payload and not a byte more; None at the end."""
    data = b""
    while len(data) < HEADER or len(data) < HEADER + int.from_bytes(data[:HEADER], "big"):
        wanted = HEADER + (int.from_bytes(data[:HEADER], "big") if len(data) >= HEADER else 0)
        piece = source.read(wanted - len(data))
        if not piece:
            return None
        data += piece
    return data[HEADER:]


if __name__ == "__main__":
    sys.exit(main())
