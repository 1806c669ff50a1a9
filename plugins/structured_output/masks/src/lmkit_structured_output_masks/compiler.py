"""Compiles grammars beside the engine: hands them to a process whose children it may kill, and keeps the answers.

Failures are kept too, except those that say more about this machine's load than about the grammar. A grammar for which
nobody waits any longer is not compiled.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock, Thread
from typing import BinaryIO, cast

import msgspec
from lmkit.api import (
    Choice,
    CompiledGrammar,
    EngineBusy,
    ErrorInfo,
    Grammar,
    GrammarBackend,
    GrammarError,
    PluginError,
    Thinking,
    Vocabulary,
    blame,
    info_of,
    make_target,
)
from lmkit_killable import spawn

from lmkit_structured_output_masks.channel import MarkerTable
from lmkit_structured_output_masks.compile_process import Cancel, Job, Result, Setup, give_back, read, try_out, write

log = logging.getLogger("lmkit.engine")
WARM_UP = 4  # tokens of the walk with which a grammar comes into the engine: its first masks are the dear ones
TRIM = 16 << 20  # bytes that are worth handing back to the system


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """What compiling, and what was compiled, may take."""

    cpu_seconds: int = 5  # for one grammar
    seconds: float = 60.0  # of the clock for one, however busy the machine is
    first_seconds: float = 0.25  # of the clock, before it has to wait for others
    nbytes: int = 1 << 30  # of memory for one, while it is compiled
    compiled_bytes: int = 64 << 20  # of memory for one that is compiled
    live_bytes: int = 256 << 20  # of those in use
    cache_bytes: int = 256 << 20  # of those that are kept, and of failures
    mask_seconds: float = 0.25  # of CPU time for one mask while it is tried out; in use, twice that
    max_masks: int = 20_000  # after which one that is idle is not kept: what it has looked up grows with them
    max_waiting: int = 256  # grammars that may wait to be compiled


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request needs before it may start."""

    grammar: Grammar | None
    thinking: Thinking | None  # only its markers count
    stop_ids: tuple[int, ...]  # of the request


@dataclass(slots=True, eq=False)
class Compilation:
    """On its way. Written by the compiler's threads, `done` last; read by the engine's."""

    wanted: Wanted
    compiled: CompiledGrammar | None = None
    markers: MarkerTable | None = None
    ends: tuple[int, ...] = ()  # ids that end the output
    size: int = 0  # columns of the logits
    measured: int = 0  # bytes that the grammar was seen to take
    error: ErrorInfo | None = None
    done: bool = False
    job: int | None = None  # its number, once the process has it
    num_waiting: int = 0  # requests
    num_masks: int = 0  # that were made with it

    @property
    def nbytes(self) -> int:
        size = 1024 + (len(self.wanted.grammar.source) if self.wanted.grammar else 0)
        return size + (max(self.measured, self.compiled.nbytes) if self.compiled is not None else 0)


class Compiler:
    """The public methods are called from the engine's thread. Nothing is loaded before the first grammar comes."""

    def __init__(
        self, backends: Sequence[Choice], open_vocabulary: Callable[[], Vocabulary],
        limits: CompileLimits | None = None,
    ) -> None:  # fmt: skip
        """`backends`: those that may be used, best first."""
        self.limits = limits or CompileLimits()
        self._choices = {choice.name: choice for choice in backends}
        self._open_vocabulary = open_vocabulary
        self._loaded: dict[str, GrammarBackend] = {}
        self._vocabulary: Vocabulary | None = None
        self._markers: dict[tuple[Thinking, tuple[int, ...]], MarkerTable] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: Thread | None = None
        self._inbox: SimpleQueue[Compilation | None] = SimpleQueue()
        self._num_jobs = 0
        self._lock = Lock()  # of what follows
        self._jobs: dict[int, Compilation] = {}  # that the process has
        self._known: OrderedDict[Wanted, Compilation] = OrderedDict()  # least recently used first
        self._nbytes = 0
        self._num_waiting = 0

    def submit(self, wanted: Wanted) -> Compilation:
        """The same is compiled once. Raises EngineBusy."""
        with self._lock:
            known = self._known.get(wanted)
            if known is not None:
                self._known.move_to_end(wanted)
                known.num_waiting += 1
                return known
            if self._num_waiting >= self.limits.max_waiting:
                raise EngineBusy(f"{self._num_waiting} grammars wait to be compiled", fix="try again in a while")
            self._num_waiting += 1
            compilation = self._known[wanted] = Compilation(wanted, num_waiting=1)
        if self._thread is None:
            self._thread = Thread(target=self._work, name="lmkit-grammars", daemon=True)
            self._thread.start()
        self._inbox.put(compilation)
        return compilation

    def withdraw(self, compilation: Compilation) -> None:
        """A request that waited for it does so no longer."""
        with self._lock:
            compilation.num_waiting -= 1
            if compilation.done or compilation.num_waiting > 0:
                return
            compilation.done = True
            self._num_waiting -= 1
            self._known.pop(compilation.wanted, None)
        self._inbox.put(compilation)  # for the second time: to be given up

    def spoil(self, compilation: Compilation, error: ErrorInfo) -> None:
        """It did harm in use: it is refused from now on."""
        with self._lock:
            kept = self._known.get(compilation.wanted) is compilation
            self._nbytes -= compilation.nbytes if kept else 0
            compilation.compiled, compilation.error = None, error
            self._nbytes += compilation.nbytes if kept else 0

    def forget(self, compilation: Compilation) -> None:
        """Frees it; when it is wanted again, it is compiled again."""
        with self._lock:
            if compilation.done and self._known.get(compilation.wanted) is compilation:
                del self._known[compilation.wanted]
                self._nbytes -= compilation.nbytes

    def close(self) -> None:
        """Idempotent. What waits stays undone."""
        self._inbox.put(None)
        self._kill()

    # ---------------------------------------------------------------------------------------- in the first thread

    def _work(self) -> None:
        while (compilation := self._inbox.get()) is not None:
            try:
                if not compilation.done:
                    self._prepare(compilation)
                    self._send(compilation)
                elif compilation.job is not None and self._process is not None:
                    with self._lock:
                        self._jobs.pop(compilation.job, None)
                    write(cast(BinaryIO, self._process.stdin), Cancel(compilation.job))
            except BaseException as error:  # a native library's, too
                self._fail(compilation, error)

    def _prepare(self, compilation: Compilation) -> None:
        """All but the grammar. Raises GrammarError."""
        vocabulary = self._vocabulary = self._vocabulary or self._open_vocabulary()
        wanted = compilation.wanted
        stops = vocabulary.special_ids.intersection(wanted.stop_ids)
        compilation.size = vocabulary.size
        compilation.ends = tuple(sorted(stops.union(vocabulary.eos_token_ids)))
        if wanted.grammar is not None and not compilation.ends:
            raise GrammarError("the model has no end token", fix="name a control token in stop_token_ids")
        if wanted.thinking is not None:
            key = (wanted.thinking, compilation.ends)
            if key not in self._markers:
                self._markers[key] = MarkerTable(wanted.thinking, vocabulary, compilation.ends)
            compilation.markers = self._markers[key]

    def _send(self, compilation: Compilation) -> None:
        """To the process. Raises GrammarError."""
        grammar = compilation.wanted.grammar
        if grammar is None:
            self._finish(compilation)
            return
        names = self._takers(grammar)
        process = self._running()
        with self._lock:
            self._num_jobs += 1
            compilation.job = self._num_jobs
            self._jobs[compilation.job] = compilation
        try:
            write(cast(BinaryIO, process.stdin), Job(compilation.job, names, grammar))
        except OSError:  # it has ended: the other thread says so to all that it had
            pass

    def _takers(self, grammar: Grammar) -> list[str]:
        """The backends to ask, in order. Raises GrammarError."""
        known = ", ".join(self._choices) or "none"
        if grammar.backend is not None and grammar.backend not in self._choices:
            raise GrammarError(f"there is no grammar backend {grammar.backend!r} here (there is: {known})")
        if not self._choices:
            raise GrammarError("no grammar backend is installed", fix="install a grammar plugin (lmkit plugins list)")
        names = [grammar.backend] if grammar.backend else list(self._choices)
        names = [name for name in names if grammar.kind in self._backend(name).kinds]
        if not names:
            raise GrammarError(f"no grammar backend here takes {grammar.kind!r} (asked: {grammar.backend or known})")
        return names

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            # the libraries that it loads must not start threads, which a fork would lose
            environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            process = self._process = spawn("lmkit_structured_output_masks.compile_process", environment)
            assert self._vocabulary is not None
            vocab, limits = self._vocabulary, self.limits
            setup = Setup(
                list(vocab.pieces), list(vocab.special_ids), vocab.eos_token_ids, vocab.size,
                list(self._choices.values()), limits.cpu_seconds, limits.seconds, limits.first_seconds, limits.nbytes,
                limits.compiled_bytes, limits.mask_seconds,
            )  # fmt: skip
            Thread(target=self._listen, args=(process,), name="lmkit-grammars-done", daemon=True).start()
            write(cast(BinaryIO, process.stdin), setup)
        return self._process

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()

    # --------------------------------------------------------------------------------------- in the second thread

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Takes in results until the process ends."""
        with process, cast(BinaryIO, process.stdout) as source:
            while (payload := read(source)) is not None:
                result = msgspec.msgpack.decode(payload, type=Result)
                with self._lock:
                    compilation = self._jobs.pop(result.id, None)
                if compilation is None:
                    continue
                try:
                    self._take(compilation, result)
                except BaseException as error:
                    self._fail(compilation, error)
        if self._process is process:
            self._process = None
        with self._lock:
            lost, self._jobs = list(self._jobs.values()), {}
        for compilation in lost:
            reason = f"the compiling process ended with status {process.returncode}"
            self._fail(compilation, GrammarError(f"the grammar was not compiled: {reason}"), lasting=False)

    def _take(self, compilation: Compilation, result: Result) -> None:
        if result.unfinished is not None:
            error = GrammarError(f"the grammar was not compiled: {result.unfinished}")
            self._fail(compilation, error, lasting=result.lasting)
            return
        if not result.backend and result.faults:
            raise PluginError("; ".join(result.faults), fix="the engine's log has the cause")
        if not result.backend:
            raise GrammarError(_told(result.refused), fix="change the constraint, or leave it out")
        compiled = self._backend(result.backend).load(result.compiled)
        try_out(compiled, compilation.size, compilation.ends, 2 * self.limits.mask_seconds, WARM_UP)
        compilation.compiled, compilation.measured = compiled, result.nbytes
        self._finish(compilation)

    # ------------------------------------------------------------------------------------------------ in both

    def blame(self, error: BaseException) -> BaseException:
        """The error, or one that names the grammar backend whose code raised it."""
        return blame(error, self._choices.values())

    def _fail(self, compilation: Compilation, error: BaseException, *, lasting: bool = True) -> None:
        error = self.blame(error)
        if not isinstance(error, GrammarError):
            lasting = False
            log.error("a grammar could not be compiled", exc_info=error)
        compilation.error = info_of(error)
        self._finish(compilation, lasting)

    def _finish(self, compilation: Compilation, lasting: bool = True) -> None:
        with self._lock:
            if compilation.done:  # withdrawn
                return
            compilation.done = True
            self._num_waiting -= 1
            if not lasting:
                del self._known[compilation.wanted]
                return
            self._nbytes += compilation.nbytes
            freed = 0
            while self._nbytes > self.limits.cache_bytes:
                oldest = next(c for c in self._known.values() if c.done)
                if oldest is compilation:
                    break
                del self._known[oldest.wanted]
                self._nbytes -= oldest.nbytes
                freed += oldest.nbytes
                del oldest
        if freed > TRIM:
            give_back()

    def _backend(self, name: str) -> GrammarBackend:
        if name not in self._loaded:
            choice = self._choices[name]
            self._loaded[name] = make_target(choice, self._vocabulary)
        return self._loaded[name]


_SOURCE = re.compile(r"(\[[\d:.]+\] )?(/[\w.+-]+)+\.\w+:\d+(:\d+)?:? *")


def _told(reasons: Mapping[str, str]) -> str:
    """Without the places in a library's source that some put before their reasons."""
    shown = {name: _SOURCE.sub("", reason) for name, reason in reasons.items()}
    if len(shown) == 1:
        return f"the grammar is refused: {next(iter(shown.values()))}"
    return "the grammar is refused: " + "; ".join(f"{name}: {reason}" for name, reason in shown.items())
