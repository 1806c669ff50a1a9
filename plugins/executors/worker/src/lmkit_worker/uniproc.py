"""UniprocExecutor: one worker in this process, called directly. No IPC per step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from lmkit.api import (
    Checkpoint,
    ConfigError,
    Control,
    EngineError,
    Failure,
    GrammarMasks,
    KVConfig,
    Reply,
    ResolvedPlan,
    SchedLimits,
    StepPlan,
    StepResult,
    WorkerFacts,
)

from lmkit_worker.future import StepFuture
from lmkit_worker.worker import Worker

if TYPE_CHECKING:
    from lmkit.api import EngineConfig, Progress


class UniprocExecutor:
    """Runs steps in the calling thread: on the CPU `forward` and `sample` return when all is computed, elsewhere when
    it is launched.

    A step that raises fails its own future. There is no other rank that could die, so `on_failure` is never called.
    """

    def __init__(
        self, config: EngineConfig, resolved: ResolvedPlan, checkpoint: Checkpoint, progress: Progress | None = None
    ) -> None:
        self.depth = config.parallel.in_flight
        if self.depth > 2:
            raise ConfigError(f"one step is prepared while another runs, and not {self.depth}", fix="--depth 2")
        self.worker: Worker | None = Worker(config, resolved, checkpoint, progress)
        self._failed: dict[int, Exception] = {}  # step -> what its forward pass raised

    def start(self) -> WorkerFacts:
        return self._open.load()

    def configure_kv(self, kv: KVConfig, limits: SchedLimits) -> None:
        self._open.configure_kv(kv, limits)

    def forward(self, plan: StepPlan) -> None:
        try:
            self._open.forward(plan)
        except Exception as e:
            self._failed[plan.step] = e

    def sample(self, step: int, masks: GrammarMasks | None) -> Future[StepResult]:
        try:
            if error := self._failed.pop(step, None):
                raise error
            return StepFuture(self._open.sample(step, masks).read)
        except Exception as e:
            failed: Future[StepResult] = Future()
            failed.set_exception(e)
            return failed

    def control(self, command: Control) -> list[Reply]:
        return [self._open.control(command)]

    def inspect_adapter(self, path: str) -> str:
        return self._open.inspect_adapter(path)

    def on_failure(self, callback: Callable[[Failure], None]) -> None:
        """Nothing to report: if this process dies, so does the caller."""

    def close(self) -> None:
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.close()

    @property
    def _open(self) -> Worker:
        if self.worker is None:
            raise EngineError("the executor is closed")
        return self.worker
