"""MultiprocExecutor: one process per rank on this host. This process runs no model, and does not import torch.

Every rank gets the same orders, encoded once, over a socket of its own; the first answers. The ranks' collectives keep
them together, so a rank that fails alone leaves the others waiting: then all are ended, and that is one Failure.

Stages work on steps of different rows at the same time: each takes up its orders one after another, and hidden states
come to the next in the order of the steps.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from select import POLLHUP, POLLIN, poll
from threading import Event, Lock, Thread
from time import monotonic
from typing import TYPE_CHECKING, Protocol, TypeVar

from lmkit.api import (
    Checkpoint,
    ConfigError,
    Control,
    EngineDead,
    EngineError,
    Failure,
    ForgetRows,
    GrammarMasks,
    KVConfig,
    KVSpec,
    LmkitError,
    Reply,
    ResetCache,
    ResolvedPlan,
    SchedLimits,
    StepPlan,
    StepResult,
    WorkerFacts,
    error_of,
)
from lmkit_worker.future import StepFuture

from lmkit_multiproc.hooks import IN_FLIGHT, most_in_flight
from lmkit_multiproc.messages import (
    Answered,
    Command,
    Configure,
    Configured,
    Forward,
    Known,
    Load,
    Loaded,
    Order,
    Phase,
    Raised,
    Report,
    Sample,
    Sampled,
    Told,
    decode_report,
    encode,
    first_with_head,
    send_whole,
)

if TYPE_CHECKING:
    from lmkit.api import EngineConfig, Progress

T = TypeVar("T")
ALONE_SECONDS = 1.5  # after which a rank whose step failed, or that could not load, is alone with that
ORDER_SECONDS = 60.0  # the same of other orders, which may take others long
LARGE = 1 << 16  # bytes of orders that a rank may leave unread while it says much itself, and neither side waits


class Process:
    """One rank's process, from outside: it ends when `close` is called, or when this process does."""

    def __init__(self, rank: int, shared: Sequence[int]) -> None:
        """`shared`: files that it inherits."""
        self.rank = rank
        mine, orders = socket.socketpair()
        self.life, life = socket.socketpair()
        with orders, life:
            inherited = [orders.fileno(), life.fileno()]
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lmkit_multiproc.rank", str(rank), *map(str, inherited)],
                pass_fds=[*inherited, *shared],
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C reaches the front end only; it decides
            )
        self.connection = Connection(mine.detach())

    def kill(self) -> None:
        """Does not wait for its end."""
        self.process.kill()

    def close(self) -> None:
        """Ends it at once. Idempotent."""
        self.life.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.connection.close()

    def status(self) -> str:
        """How it ended, in words."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1)
        code = self.process.returncode
        return f"its process was ended by signal {-code}" if code and code < 0 else f"its process ended with {code}"


class Rank(Protocol):
    """One rank's process, wherever it is, from outside."""

    rank: int
    connection: Connection

    def kill(self) -> None: ...
    def close(self) -> None: ...
    def status(self) -> str: ...


@dataclass(slots=True)
class Asked:
    """What ranks have said of a step in flight."""

    result: StepResult | None = None  # of the first rank that has the head
    raised: dict[int, LmkitError] = field(default_factory=dict)  # by rank
    early: bool = False  # before hidden states were passed on, for all we know


class RanksExecutor(ABC):
    """Runs `tp` ranks for each of `pp` stages, those of the first stage first."""

    def __init__(
        self, config: EngineConfig, resolved: ResolvedPlan, checkpoint: Checkpoint, progress: Progress | None = None
    ) -> None:
        self._config, self._resolved, self._checkpoint, self._progress = config, resolved, checkpoint, progress
        self.size = config.parallel.tp * config.parallel.pp
        self._first = first_with_head(config)  # from which on ranks draw tokens
        self.depth, most = config.parallel.in_flight, most_in_flight(config)
        if self.depth > most:
            raise ConfigError(f"{IN_FLIGHT}, {most} here, and not {self.depth}", fix=f"--depth {most}")
        if resolved.draft is not None and self.size > 1:  # each would choose lengths by a clock of its own
            raise ConfigError(f"guesses of a model cannot be split over {self.size} ranks", fix="--proposer ngram")
        if config.model.packed_cache is not None and config.parallel.pp > 1:
            raise ConfigError("packed weights are kept of whole models, not of some layers", fix="no --packed-cache")
        self._processes: Sequence[Rank] = ()
        self._news, self._by_fd = poll(), dict[int, Rank]()  # made once: it is asked in every step
        self._asked: dict[int, Asked] = {}  # by step
        self._told: Callable[[Failure], None] | None = None
        self._failure: Failure | None = None
        self._lock = Lock()  # of the two above, and of ending
        self._said = Event()  # the failure was told to whoever asked for it
        self._closed = False

    def start(self) -> WorkerFacts:
        with ExitStack() as stack:
            places = self._begin(stack)
            for process in self._processes:
                self._by_fd[process.connection.fileno()] = process
                self._news.register(process.connection.fileno(), POLLIN | POLLHUP)
            Thread(target=self._watch, name="lmkit-ranks", daemon=True).start()
            self._order(Load(self._config, self._resolved, self._checkpoint, places))
            answers = self._answers(Loaded, ALONE_SECONDS)
        facts = [answer.facts for answer in answers]
        return replace(
            facts[0],
            kv_specs=tuple(map(_largest, *(f.kv_specs for f in facts))),
            free_kv_bytes=min(f.free_kv_bytes for f in facts),
            weight_bytes=max(f.weight_bytes for f in facts),
            activation_bytes=max(f.activation_bytes for f in facts),
            load_seconds=max(f.load_seconds for f in facts),
            pack_seconds=max(f.pack_seconds for f in facts),
            warnings=tuple(dict.fromkeys(warning for f in facts for warning in f.warnings)),
        )

    def configure_kv(self, kv: KVConfig, limits: SchedLimits) -> None:
        self._order(Configure(kv, limits))
        self._answers(Configured)

    def forward(self, plan: StepPlan) -> None:
        self._order(Forward(plan))

    def sample(self, step: int, masks: GrammarMasks | None) -> Future[StepResult]:
        self._order(Sample(step, masks))
        self._asked[step] = Asked()
        return StepFuture(partial(self._result, step))

    def control(self, command: Control) -> list[Reply]:
        if not isinstance(command, Known):
            return [Reply(False, f"{type(command).__name__} is not supported by this executor")] * self.size
        self._order(Command(command))
        answers = self._answers(Answered)
        if isinstance(command, ForgetRows | ResetCache):
            self._asked.clear()
        return [answer.reply for answer in answers]

    def inspect_adapter(self, path: str) -> str:
        from lmkit_worker.worker import Worker

        return Worker(self._config, self._resolved, self._checkpoint).inspect_adapter(path)

    def on_failure(self, callback: Callable[[Failure], None]) -> None:
        with self._lock:
            self._told = callback
            failure = self._failure
        if failure is not None:
            callback(failure)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for process in self._processes:
            process.close()

    # -------------------------------------------------------------------------------------------------- details

    @abstractmethod
    def _begin(self, until_loaded: ExitStack) -> tuple[str, ...]:
        """Starts the ranks. Returns where they meet, as Worker has it."""

    @abstractmethod
    def _ended(self) -> Rank:
        """Waits for the first that has ended."""

    def _order(self, order: Order, to: Sequence[Rank] | None = None) -> None:
        """To all ranks, or these; encoded once. A rank that is gone is noticed by whoever waits for an answer."""
        if self._closed:
            raise EngineError("the executor is closed")
        frame = encode(order)
        if len(frame) * self.depth > LARGE:
            for step in list(self._asked):
                self._settle(step)
        for process in self._processes if to is None else to:
            with suppress(OSError):
                send_whole(frame, process.connection)

    def _result(self, step: int) -> StepResult:
        """The first rank's with the head; raises what all of these raised."""
        self._settle(step)
        asked = self._asked.pop(step)
        if asked.result is None:
            raise asked.raised[self._first]
        if self._first:
            self._order(Told(step, asked.result.tokens), self._processes[: self._first])
        return asked.result

    def _settle(self, step: int) -> None:
        """Waits until it is known what became of a step, those before being over. Raises EngineDead."""
        asked, late = self._asked[step], None  # when ranks that raised are alone with that
        while asked.result is None and not self._all_raised(asked):
            if asked.raised and late is None:
                late = monotonic() + ALONE_SECONDS
            if late is not None and monotonic() > late:
                rank, error = next(iter(asked.raised.items()))
                raise self._fail(rank, f"failed alone in step {step}: {error.message}")
            for process, report in self._reports(late):
                self._hear(process.rank, report)

    def _all_raised(self, asked: Asked) -> bool:
        """Those that draw; before that, all: else hidden states are left that the next step would take for its own."""
        return asked.raised.keys() >= set(range(0 if asked.early else self._first, self.size))

    def _hear(self, rank: int, report: Report) -> None:
        """What a rank says of a step in flight. Raises EngineDead where others did something else."""
        step = report.result.step if isinstance(report, Sampled) else getattr(report, "step", -1)
        asked = self._asked.get(step)
        if asked is None or asked.result is not None or (asked.raised and isinstance(report, Sampled)):
            raise self._fail(rank, f"did what the others did not in step {step}: {report}")
        if isinstance(report, Sampled):
            asked.result = report.result
        elif isinstance(report, Raised):
            asked.raised[rank] = error_of(report.error)
            asked.early |= report.early

    def _answers(self, kind: type[T], patience: float = ORDER_SECONDS) -> list[T]:
        """One of each rank, in order. Raises the error of the first rank that has one, when all have answered or
        `patience` seconds later: what is left unread would be taken for the answer to the next order. What is said of
        steps in flight comes before, and is kept for those who ask for it."""
        answers: dict[int, T] = {}
        raised: dict[int, LmkitError] = {}
        late: float | None = None
        while len(answers) + len(raised) < self.size and (late is None or monotonic() < late):
            for process, report in self._reports(late):
                if isinstance(report, Phase):
                    if self._progress is not None:
                        self._progress(report.phase, report.done, report.total, report.unit)
                elif isinstance(report, Sampled) or (isinstance(report, Raised) and report.step is not None):
                    self._hear(process.rank, report)
                    if isinstance(report, Raised):  # alone it leaves others waiting
                        late = late or monotonic() + patience
                elif isinstance(report, Raised):
                    raised[process.rank] = error_of(report.error)
                    late = late or monotonic() + patience
                else:
                    assert isinstance(report, kind), report
                    answers[process.rank] = report
        if len(answers) + len(raised) < self.size:
            alone = {**raised, **{rank: e for asked in self._asked.values() for rank, e in asked.raised.items()}}
            rank, error = min(alone.items(), key=lambda each: each[0])
            failed = self._fail(rank, f"failed alone: {error.message}")
            if not raised:
                raise failed
        if raised:
            raise raised[min(raised)]
        return [answers[rank] for rank in range(self.size)]

    def _reports(self, until: float | None = None) -> Iterator[tuple[Rank, Report]]:
        """What ranks have to say: waits for one, or until that time. Raises EngineDead when a rank is gone."""
        for fd, _ in self._news.poll(None if until is None else max(0.0, until - monotonic()) * 1000):
            process = self._by_fd[fd]
            try:
                report = decode_report(process.connection.recv_bytes())
            except (EOFError, OSError):
                raise self._fail(process.rank, process.status()) from None
            yield process, report

    def _watch(self) -> None:
        """Notices that a rank is gone, also when nobody waits for it."""
        ended = self._ended()
        if not self._closed:
            self._fail(ended.rank, ended.status())

    def _fail(self, rank: int, message: str) -> EngineDead:
        """Ends all ranks and says so, once; whoever is told of it later finds the engine told."""
        with self._lock:
            first, failure = self._failure is None, self._failure or Failure(rank, message)
            told = self._told if first and not self._closed else None
            self._failure = failure
        for process in self._processes:
            process.kill()
        if told is not None:
            told(failure)
        if first:
            self._said.set()
        self._said.wait(1)
        return EngineDead(f"rank {failure.rank}: {failure.message}")


class MultiprocExecutor(RanksExecutor):
    """One process per rank on this host."""

    def _begin(self, until_loaded: ExitStack) -> tuple[str, ...]:
        met = [until_loaded.enter_context(_meeting_place()) for _ in range(num_meetings(self._config))]
        self._processes: Sequence[Process] = [Process(rank, [fd for _, fd in met]) for rank in range(self.size)]
        return tuple(f"file://{path}" for path, _ in met)

    def _ended(self) -> Process:
        ends, ranks = poll(), {process.life.fileno(): process for process in self._processes}
        for fd in ranks:
            ends.register(fd, POLLIN | POLLHUP)
        return ranks[ends.poll()[0][0]]


def num_meetings(config: EngineConfig) -> int:
    """Groups that ranks meet in: the parts of each stage, then the stages of each part."""
    tp, pp = config.parallel.tp, config.parallel.pp
    return (tp > 1) * pp + (pp > 1) * tp


def _largest(*specs: KVSpec) -> KVSpec:
    """A group as ranks of different layers have it: a block takes what it takes of the one that has most of them."""
    layers = sorted({layer for spec in specs for layer in spec.layers})
    return replace(specs[0], layers=tuple(layers), bytes_per_block=max(spec.bytes_per_block for spec in specs))


@contextmanager
def _meeting_place() -> Iterator[tuple[str, int]]:
    """A file without a name, which whoever inherits the descriptor opens by the path; gone when the last closes it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("lmkit-ranks")
        try:
            yield f"/proc/self/fd/{fd}", fd
        finally:
            os.close(fd)
    else:
        with tempfile.NamedTemporaryFile(prefix="lmkit-ranks") as file:
            yield file.name, file.fileno()
