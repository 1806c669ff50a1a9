"""EngineCore: the step loop. One thread calls it; it never sees text, JSON or tensors."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import msgspec

from lmkit.api import (
    Choice,
    Control,
    EngineDead,
    EngineError,
    EngineRequest,
    Executor,
    Failure,
    ForgetRows,
    PluginError,
    ResetCache,
    SchedStats,
    Scheduler,
    StepPlan,
    StepResult,
    StructuredOutput,
    TokenEvent,
    WorkAhead,
    blame,
    blaming,
    is_interrupt,
)
from lmkit.engine.adapters import Adapters, NoAdapters
from lmkit.engine.intake import Intake
from lmkit.engine.life import Life
from lmkit.scheduling.request import Request

log = logging.getLogger("lmkit.engine")

CHECK_INTERVAL = 1000  # steps between full checks of the invariants, made when the engine falls idle


class _StepFailed(Exception):
    """The executor did not do the step of `plan`; `error` says why."""

    def __init__(self, plan: StepPlan, error: BaseException) -> None:
        super().__init__(str(error))
        self.plan, self.error = plan, error


@contextmanager
def _faults_of_executor(plan: StepPlan) -> Iterator[None]:
    """What goes wrong there costs a step; what goes wrong here ends the engine."""
    try:
        yield
    except BaseException as e:  # a plugin may raise SystemExit, too
        if is_interrupt(e):
            raise
        raise _StepFailed(plan, e) from e


class EngineCore:
    """Scheduler and executor, with up to `executor.depth` steps in flight.

    A fault of one row fails that request. The rows of a failed step are tried again one by one, so that only the one at
    fault ends. A failure of a rank kills the engine: every later call of `step` raises EngineDead.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        intake: Intake,
        grammars: StructuredOutput | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.intake = intake
        self.grammars = grammars or intake.grammars
        self.adapters = adapters or NoAdapters()
        self.choices: Sequence[Choice] = ()  # the plugins that errors may come from; set by the engine's builder
        self.failure: Failure | None = None
        self.blocked = False  # the last step had nothing to run: all requests wait for gates
        self.pending: deque[tuple[StepPlan, Future[StepResult]]] = deque()  # steps in flight
        self.life = Life(self)
        self.on_larger: Callable[[], None] = lambda: None  # told before a step that is larger than any before
        self._largest = 0  # tokens of a step
        self._since_check = 0
        self.num_compiled = 0  # kernels that steps waited for
        self._ahead = False  # something may be left to be done ahead
        executor.on_failure(self._on_failure)

    def add(self, request: EngineRequest) -> None:
        """Raises RequestError when the request is wrong, EngineBusy when too many wait."""
        with blaming(self.choices):
            self._hold_and_add(request)

    def _hold_and_add(self, request: EngineRequest) -> None:
        if request.adapter is None:
            self._add(request)
            return
        try:
            self._add(msgspec.structs.replace(request, adapter=self.adapters.hold(request.id, request.adapter)))
        except Exception:
            self.adapters.release([request.id])
            raise

    def _add(self, request: EngineRequest) -> None:
        admitted = self._admit(request)
        self.scheduler.add(admitted)
        if self.life.gate in admitted.gates:
            self.life.late.add(request.id)

    def _admit(self, request: EngineRequest) -> Request:
        admitted = self.intake.admit(request)
        if self.life.state == "finishing":
            admitted.gates.append(self.life.gate)
        return admitted

    def abort(self, ids: Iterable[str]) -> None:
        """Idempotent; no event follows."""
        ids = list(ids)
        with blaming(self.choices):
            self.scheduler.abort(ids)
            self._release(ids)

    def has_work(self) -> bool:
        if self.failure is not None or self.pending or not self.life.settled:
            return True
        return not self.life.holds and self.scheduler.has_work()

    def work_ahead(self) -> bool:
        """Nothing runs: has the workers do a piece of what later steps would have to do. False: there is none left, or
        no request has been answered yet."""
        if self.life.holds:
            return False
        self._ahead = self._ahead and all(reply.ok for reply in self.executor.control(WorkAhead()))
        return self._ahead

    def stats(self) -> SchedStats:
        return self.scheduler.stats()

    def step(self) -> list[TokenEvent]:
        """Schedule one step, run it, and take in the oldest step in flight. Raises EngineDead."""
        with blaming(self.choices):
            events = self._step()
            self._release([event.id for event in events if event.finish])
        return events

    def _release(self, ids: list[str]) -> None:
        self.adapters.release(ids)
        self.grammars.release(ids)
        self.life.late.difference_update(ids)

    def _step(self) -> list[TokenEvent]:
        if self.failure is not None:
            raise EngineDead(f"rank {self.failure.rank}: {self.failure.message}")
        self.life.look()
        plan = StepPlan(0) if self.life.holds else self.scheduler.schedule()
        self.blocked = False
        events: list[TokenEvent] = []
        try:
            if plan.rows or plan.gone or plan.saves or plan.loads:
                self._announce(plan)
                with _faults_of_executor(plan):
                    self.executor.forward(plan)
                while self.pending and self.grammars.concerns(plan) and self._awaits(plan):
                    events += self._take()
                masks = self.grammars.fill(plan)  # overlaps the forward pass
                events += self._end_broken()
                with _faults_of_executor(plan):
                    self.pending.append((plan, self.executor.sample(plan.step, masks)))
                if len(self.pending) < self.executor.depth and self.scheduler.has_work():
                    return events  # keep the pipe full
            elif not self.pending:
                self.blocked = True
                return [] if self.life.holds else self.scheduler.update(plan, StepResult(plan.step, []))
            events += self._take()
        except _StepFailed as e:
            return events + self._step_failed(e.plan, e.error)
        if not self.has_work():
            self._on_idle()
        return events

    def _awaits(self, plan: StepPlan) -> bool:
        """Whether tokens of its rows, from which their masks follow, are still in flight."""
        ids = {row.id for row in plan.rows}
        return any(row.sample and row.id in ids for before, _ in self.pending for row in before.rows)

    def _announce(self, plan: StepPlan) -> None:
        num_tokens = sum([row.num_tokens for row in plan.rows])
        if num_tokens > self._largest + self._largest // 2:
            self._largest = num_tokens
            self.on_larger()

    def _take(self) -> list[TokenEvent]:
        """The events of the oldest step in flight."""
        plan, future = self.pending.popleft()
        with _faults_of_executor(plan):
            result = future.result()
        self.num_compiled += len(result.compiled)
        self.grammars.propose(plan, result)
        return self.scheduler.update(plan, result)

    def _end_broken(self) -> list[TokenEvent]:
        """Requests whose constraint cannot be followed any further."""
        if not self.grammars.broken:
            return []
        broken, self.grammars.broken = self.grammars.broken, []
        self.scheduler.abort([id for id, _ in broken])
        return [TokenEvent(id, finish="error", error=error) for id, error in broken]

    def _step_failed(self, plan: StepPlan, error: BaseException) -> list[TokenEvent]:
        """What the workers hold is unknown: they forget their rows, which then are computed again.

        Raises EngineDead when they cannot.
        """
        self.pending.clear()
        if self.failure is not None:
            raise EngineDead(f"rank {self.failure.rank}: {self.failure.message}") from error
        rows = ", ".join(row.id for row in plan.rows[:4]) + (", ..." if len(plan.rows) > 4 else "")
        cause = blame(error, self.choices)
        # the text of others may hold paths and addresses: that is for the log, not for clients
        what = cause.message if isinstance(cause, PluginError) else type(error).__name__
        said = "step %d failed (%s; rows: %s); they are tried again one by one"
        log.error(said, plan.step, what, rows, exc_info=error)
        kind = PluginError if isinstance(cause, PluginError) else EngineError
        info = kind(f"its step failed ({what})", fix="the engine's log has the cause").info()
        retry = getattr(self.scheduler, "retry_running", None)
        if retry is not None and self._told(ForgetRows()):
            return retry(plan, info)
        if not self._told(ResetCache()):
            raise EngineDead(f"workers did not recover from a failed step ({what})") from error
        return self.scheduler.fail_running(info)

    def _told(self, command: Control) -> bool:
        """Whether all workers did it."""
        try:
            refused = [reply.message for reply in self.executor.control(command) if not reply.ok]
        except Exception as e:
            log.error("%s failed", type(command).__name__, exc_info=e)
            return False
        if refused:
            log.error("%s was refused: %s", type(command).__name__, refused)
        return not refused

    def _on_idle(self) -> None:
        """Nothing runs: a good moment to verify ourselves."""
        self._ahead = True
        self._since_check += 1
        if self._since_check >= CHECK_INTERVAL:
            self._since_check = 0
            self.scheduler.check()

    def _on_failure(self, failure: Failure) -> None:
        """Called by the executor from any thread."""
        self.failure = failure
