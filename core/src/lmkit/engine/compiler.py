"""Compiles grammars beside the engine: a thread that hands them to a process it may kill, and a cache of the answers.

Failures are cached too, except those that say more about this machine's load than about the grammar.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock, Thread
from time import monotonic

import msgspec

from lmkit.api import (
    Choice,
    CompiledGrammar,
    EngineBusy,
    ErrorInfo,
    Grammar,
    GrammarBackend,
    GrammarError,
    Thinking,
    Vocabulary,
)
from lmkit.config.environment import child_environment
from lmkit.engine.channel import MarkerTable
from lmkit.engine.compile_process import HEADER, OUT_OF_MEMORY, Job, Result, Setup, write
from lmkit.engine.messages import info_of
from lmkit.plugins import load_target

log = logging.getLogger("lmkit.engine")


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """What compiling may take."""

    cpu_seconds: int = 5  # for one grammar
    seconds: float = 60.0  # of the clock for one, however busy the machine is
    nbytes: int = 1 << 30  # of memory for one
    max_waiting: int = 256  # grammars that may wait to be compiled
    cache_bytes: int = 256 << 20  # of compiled grammars, and of failures


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request needs before it may start."""

    grammar: Grammar | None
    thinking: Thinking | None  # only its markers count
    stop_ids: tuple[int, ...]  # of the request


@dataclass(slots=True)
class Compilation:
    """On its way. Written by the compiler's thread, `done` last; read by the engine's."""

    wanted: Wanted
    compiled: CompiledGrammar | None = None
    markers: MarkerTable | None = None
    ends: tuple[int, ...] = ()  # ids that end the output
    size: int = 0  # columns of the logits
    error: ErrorInfo | None = None
    done: bool = False

    @property
    def nbytes(self) -> int:
        size = 1024 + (len(self.wanted.grammar.source) if self.wanted.grammar else 0)
        return size + (self.compiled.nbytes if self.compiled is not None else 0)


class _Unfinished(Exception):
    """The process gave no answer. `lasting`: it would not give one next time either."""

    def __init__(self, reason: str, *, lasting: bool) -> None:
        super().__init__(reason)
        self.lasting = lasting


class Compiler:
    """`submit` is called from the engine's thread. Nothing is loaded before the first grammar comes."""

    def __init__(
        self, backends: Sequence[Choice], open_vocabulary: Callable[[], Vocabulary],
        limits: CompileLimits | None = None,
    ) -> None:  # fmt: skip
        """`backends`: those that may be used, best first."""
        self._choices = {choice.name: choice for choice in backends}
        self._open_vocabulary = open_vocabulary
        self._limits = limits or CompileLimits()
        self._loaded: dict[str, GrammarBackend] = {}
        self._vocabulary: Vocabulary | None = None
        self._markers: dict[tuple[Thinking, tuple[int, ...]], MarkerTable] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: Thread | None = None
        self._inbox: SimpleQueue[Compilation | None] = SimpleQueue()
        self._lock = Lock()  # of the two below
        self._known: OrderedDict[Wanted, Compilation] = OrderedDict()  # least recently used first
        self._nbytes = 0
        self._num_waiting = 0

    def submit(self, wanted: Wanted) -> Compilation:
        """The same is compiled once. Raises EngineBusy."""
        with self._lock:
            known = self._known.get(wanted)
            if known is not None:
                self._known.move_to_end(wanted)
                return known
            if self._num_waiting >= self._limits.max_waiting:
                raise EngineBusy(f"{self._num_waiting} grammars wait to be compiled", fix="try again in a while")
            self._num_waiting += 1
            compilation = self._known[wanted] = Compilation(wanted)
        if self._thread is None:
            self._thread = Thread(target=self._work, name="lmkit-grammars", daemon=True)
            self._thread.start()
        self._inbox.put(compilation)
        return compilation

    def close(self) -> None:
        """Idempotent. What waits stays undone."""
        self._inbox.put(None)
        self._kill()

    # ------------------------------------------------------------------------------------------- in the thread

    def _work(self) -> None:
        while (compilation := self._inbox.get()) is not None:
            lasting = True
            try:
                self._make(compilation)
            except _Unfinished as error:
                lasting = error.lasting
                compilation.error = GrammarError(f"the grammar was not compiled: {error}").info()
            except Exception as error:
                if not isinstance(error, GrammarError):
                    lasting = False
                    log.error("a grammar could not be compiled", exc_info=error)
                compilation.error = info_of(error)
            compilation.done = True
            self._keep(compilation, lasting)

    def _make(self, compilation: Compilation) -> None:
        vocabulary = self._vocabulary = self._vocabulary or self._open_vocabulary()
        wanted = compilation.wanted
        stops = vocabulary.special_ids.intersection(wanted.stop_ids)
        compilation.size = vocabulary.size
        compilation.ends = tuple(sorted(stops.union(vocabulary.eos_token_ids)))
        if wanted.grammar is not None:
            if not compilation.ends:
                raise GrammarError("the model has no end token", fix="name a control token in stop_token_ids")
            compilation.compiled = self._compile(wanted.grammar)
        if wanted.thinking is not None:
            key = (wanted.thinking, compilation.ends)
            if key not in self._markers:
                self._markers[key] = MarkerTable(wanted.thinking, vocabulary, compilation.ends)
            compilation.markers = self._markers[key]

    def _keep(self, compilation: Compilation, lasting: bool) -> None:
        with self._lock:
            self._num_waiting -= 1
            if not lasting:
                del self._known[compilation.wanted]
                return
            self._nbytes += compilation.nbytes
            while self._nbytes > self._limits.cache_bytes:
                oldest = next(c for c in self._known.values() if c.done)
                if oldest is compilation:
                    break
                del self._known[oldest.wanted]
                self._nbytes -= oldest.nbytes

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        """By the first backend that takes it. Raises GrammarError with the reasons of all."""
        known = ", ".join(self._choices) or "none"
        if grammar.backend is not None and grammar.backend not in self._choices:
            raise GrammarError(f"there is no grammar backend {grammar.backend!r} here (there is: {known})")
        if not self._choices:
            raise GrammarError("no grammar backend is installed", fix="install a grammar plugin (lmkit plugins list)")
        reasons: dict[str, str] = {}
        for name in [grammar.backend] if grammar.backend else list(self._choices):
            backend = self._backend(name)
            if grammar.kind not in backend.kinds:
                continue
            result = self._ask(Job(name, grammar))
            if result.refused is None:
                return backend.load(result.compiled)
            reasons[name] = result.refused
        if not reasons:
            raise GrammarError(f"no grammar backend here takes {grammar.kind!r} (asked: {grammar.backend or known})")
        raise GrammarError(_told(reasons), fix="change the constraint, or leave it out")

    def _backend(self, name: str) -> GrammarBackend:
        if name not in self._loaded:
            choice = self._choices[name]
            self._loaded[name] = load_target(choice)(self._vocabulary, **choice.options)
        return self._loaded[name]

    def _ask(self, job: Job) -> Result:
        """Raises _Unfinished; the process is then gone."""
        process = self._running()
        assert process.stdin is not None
        try:
            write(process.stdin, job)  # type: ignore[arg-type]
            return msgspec.msgpack.decode(self._answer(process), type=Result)
        except (OSError, EOFError):
            status = process.wait()
            self._kill()
            raise _unfinished(status, self._limits) from None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lmkit.engine.compile_process"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment({}), process_group=0,
            )  # fmt: skip
            assert self._vocabulary is not None
            assert self._process.stdin is not None
            vocab, limits = self._vocabulary, self._limits
            setup = Setup(
                list(vocab.pieces), list(vocab.special_ids), vocab.eos_token_ids, vocab.size,
                list(self._choices.values()), limits.cpu_seconds, limits.nbytes,
            )  # fmt: skip
            write(self._process.stdin, setup)  # type: ignore[arg-type]
        return self._process

    def _answer(self, process: subprocess.Popen[bytes]) -> bytes:
        """One payload. Raises EOFError when the process ended, _Unfinished when it takes too long."""
        assert process.stdout is not None
        end, data = monotonic() + self._limits.seconds, b""
        while len(data) < HEADER or len(data) < HEADER + int.from_bytes(data[:HEADER], "big"):
            if not select.select([process.stdout], [], [], max(0.0, end - monotonic()))[0]:
                self._kill()
                raise _Unfinished(f"no answer within {self._limits.seconds:g} s", lasting=False)
            piece = os.read(process.stdout.fileno(), 1 << 20)
            if not piece:
                raise EOFError
            data += piece
        return data[HEADER:]

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


def _told(reasons: Mapping[str, str]) -> str:
    if len(reasons) == 1:
        return f"the grammar is refused: {next(iter(reasons.values()))}"
    return "the grammar is refused: " + "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def _unfinished(status: int, limits: CompileLimits) -> _Unfinished:
    """From the exit status of the process."""
    if status == -signal.SIGXCPU:
        return _Unfinished(f"it takes more than {limits.cpu_seconds} s of CPU time", lasting=True)
    if status in (OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGSEGV):
        return _Unfinished(f"it takes more than {limits.nbytes >> 20} MiB of memory", lasting=True)
    return _Unfinished(f"the compiling process ended with status {status}", lasting=False)
