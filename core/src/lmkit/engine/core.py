"""EngineCore: the step loop. One thread calls it; it never sees text, JSON or tensors."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import msgspec

from lmkit.api import (
    EngineDead,
    EngineError,
    EngineRequest,
    Executor,
    Failure,
    LmkitError,
    ResetCache,
    SchedStats,
    Scheduler,
    StepPlan,
    StepResult,
    TokenEvent,
)
from lmkit.engine.adapters import Adapters, NoAdapters
from lmkit.engine.intake import Grammars, Intake, NoGrammars

log = logging.getLogger("lmkit.engine")

CHECK_INTERVAL = 1000  # steps between full checks of the invariants, made when the engine falls idle


class _StepFailed(Exception):
    """The executor did not do a step; `error` says why."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def _faults_of_executor() -> Iterator[None]:
    """What goes wrong there ends the running requests; what goes wrong here ends the engine."""
    try:
        yield
    except Exception as e:
        raise _StepFailed(e) from e


class EngineCore:
    """Scheduler and executor, with up to `executor.depth` steps in flight.

    A fault of one row fails that request. A failed step fails the running requests and empties the prefix cache; the
    waiting ones go on. A failure of a rank kills the engine: every later call of `step` raises EngineDead.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        intake: Intake,
        grammars: Grammars | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.intake = intake
        self.grammars = grammars or intake.grammars or NoGrammars()
        self.adapters = adapters or NoAdapters()
        self.failure: Failure | None = None
        self.blocked = False  # the last step had nothing to run: all requests wait for gates
        self._pending: deque[tuple[StepPlan, Future[StepResult]]] = deque()
        self._since_check = 0
        executor.on_failure(self._on_failure)

    def add(self, request: EngineRequest) -> None:
        """Raises RequestError when the request is wrong, EngineBusy when too many wait."""
        if request.adapter is None:
            self.scheduler.add(self.intake.admit(request))
            return
        try:
            held = msgspec.structs.replace(request, adapter=self.adapters.hold(request.id, request.adapter))
            self.scheduler.add(self.intake.admit(held))
        except LmkitError:
            self.adapters.release([request.id])
            raise

    def abort(self, ids: Iterable[str]) -> None:
        """Idempotent; no event follows."""
        ids = list(ids)
        self.scheduler.abort(ids)
        self._release(ids)

    def has_work(self) -> bool:
        return bool(self._pending) or self.scheduler.has_work()

    def stats(self) -> SchedStats:
        return self.scheduler.stats()

    def step(self) -> list[TokenEvent]:
        """Schedule one step, run it, and take in the oldest step in flight. Raises EngineDead."""
        events = self._step()
        self._release([event.id for event in events if event.finish])
        return events

    def _release(self, ids: list[str]) -> None:
        self.adapters.release(ids)
        self.grammars.release(ids)

    def _step(self) -> list[TokenEvent]:
        if self.failure is not None:
            raise EngineDead(f"rank {self.failure.rank}: {self.failure.message}")
        plan = self.scheduler.schedule()
        self.blocked = False
        events: list[TokenEvent] = []
        try:
            if plan.rows or plan.gone:
                with _faults_of_executor():
                    self.executor.forward(plan)
                while self._pending and self.grammars.concerns(plan):  # masks follow from tokens still in flight
                    events += self._take()
                masks = self.grammars.fill(plan)  # overlaps the forward pass
                events += self._end_broken()
                with _faults_of_executor():
                    self._pending.append((plan, self.executor.sample(plan.step, masks)))
                if len(self._pending) < self.executor.depth and self.scheduler.has_work():
                    return events  # keep the pipe full
            elif not self._pending:
                self.blocked = True
                return self.scheduler.update(plan, StepResult(plan.step, []))
            events += self._take()
        except _StepFailed as e:
            return events + self._step_failed(e.error)
        if not self.has_work():
            self._on_idle()
        return events

    def _take(self) -> list[TokenEvent]:
        """The events of the oldest step in flight."""
        plan, future = self._pending.popleft()
        with _faults_of_executor():
            result = future.result()
        self.grammars.propose(plan, result)
        return self.scheduler.update(plan, result)

    def _end_broken(self) -> list[TokenEvent]:
        """Requests whose constraint cannot be followed any further."""
        if not self.grammars.broken:
            return []
        broken, self.grammars.broken = self.grammars.broken, []
        self.scheduler.abort([id for id, _ in broken])
        return [TokenEvent(id, finish="error", error=error) for id, error in broken]

    def _step_failed(self, error: Exception) -> list[TokenEvent]:
        """What the workers hold is unknown: they forget it, and so do we. Raises EngineDead when they cannot."""
        self._pending.clear()
        if self.failure is not None:
            raise EngineDead(f"rank {self.failure.rank}: {self.failure.message}") from error
        log.error("a step failed; its requests end, the others go on", exc_info=error)
        what = type(error).__name__  # its text may hold paths and addresses: that is for the log, not for clients
        info = EngineError(f"a step failed ({what})", fix="the engine's log has the cause; send it again").info()
        events = self.scheduler.fail_running(info)
        try:
            replies = self.executor.control(ResetCache())
        except Exception as e:
            raise EngineDead(f"workers did not recover from a failed step ({what})") from e
        if not all(reply.ok for reply in replies):
            log.error("reset refused: %s", [reply.message for reply in replies if not reply.ok])
            raise EngineDead(f"workers did not recover from a failed step ({what})") from error
        return events

    def _on_idle(self) -> None:
        """Nothing runs: a good moment to verify ourselves."""
        self._since_check += 1
        if self._since_check >= CHECK_INTERVAL:
            self._since_check = 0
            self.scheduler.check()

    def _on_failure(self, failure: Failure) -> None:
        """Called by the executor from any thread."""
        self.failure = failure
