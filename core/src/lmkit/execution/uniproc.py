"""UniprocExecutor: one worker in this process, called directly. No IPC per step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from lmkit.api import (
    Checkpoint,
    Control,
    EngineError,
    Failure,
    GrammarMasks,
    KVConfig,
    Reply,
    ResolvedPlan,
    StepPlan,
    StepResult,
    Worker,
    WorkerFacts,
)
from lmkit.execution.worker import Worker as ModelWorker

if TYPE_CHECKING:
    from lmkit.api import Progress
    from lmkit.config import EngineConfig


class UniprocExecutor:
    """Runs steps in the calling thread: `forward` returns after the pass, `sample` returns a finished future.

    A step that raises fails the executor: the error is reported once to `on_failure`, and this and every later
    future carries it.
    """

    def __init__(
        self, config: EngineConfig, resolved: ResolvedPlan, checkpoint: Checkpoint, progress: Progress | None = None,
        worker: Worker | None = None,
    ) -> None:  # fmt: skip
        self.depth = config.parallel.depth
        self.worker: Worker = worker or ModelWorker(config, resolved, checkpoint, progress)
        self._callbacks: list[Callable[[Failure], None]] = []
        self._error: EngineError | None = None
        self._closed = False

    def start(self) -> WorkerFacts:
        return self.worker.load()

    def configure_kv(self, kv: KVConfig) -> None:
        self.worker.configure_kv(kv)

    def forward(self, plan: StepPlan) -> None:
        if self._error is None:
            try:
                self._require_open()
                self.worker.forward(plan)
            except Exception as e:
                self._fail(e)

    def sample(self, step: int, masks: GrammarMasks | None) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        if self._error is None:
            try:
                self._require_open()
                result = self.worker.sample(step, masks)
                assert result is not None, "rank 0 answers"
                future.set_result(result)
                return future
            except Exception as e:
                self._fail(e)
        future.set_exception(self._error)
        return future

    def control(self, command: Control) -> list[Reply]:
        return [self.worker.control(command)]

    def on_failure(self, callback: Callable[[Failure], None]) -> None:
        self._callbacks.append(callback)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.worker.close()

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError("the executor is closed")

    def _fail(self, cause: Exception) -> None:
        message = f"{type(cause).__name__}: {cause}"
        self._error = cause if isinstance(cause, EngineError) else EngineError(f"a step failed: {message}")
        self._error.__cause__ = cause if cause is not self._error else None
        for callback in self._callbacks:
            callback(Failure(0, message))
