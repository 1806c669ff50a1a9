"""An executor of a runner that a test has made: the engine core steps it as it steps any other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from lmkit.api import (
    Control,
    Failure,
    GrammarMasks,
    KVConfig,
    Reply,
    SchedLimits,
    StepPlan,
    StepResult,
    WorkAhead,
    WorkerFacts,
)
from lmkit_worker.future import StepFuture
from lmkit_worker.runner import Runner


class OneRunner:
    """Implements Executor; the runner is loaded and has its cache already. `depth` steps may be in flight."""

    def __init__(self, runner: Runner, depth: int = 1) -> None:
        self.runner, self.depth = runner, depth

    def start(self) -> WorkerFacts:
        raise AssertionError("the runner has begun")

    def configure_kv(self, kv: KVConfig, limits: SchedLimits) -> None:
        raise AssertionError("the runner has its cache")

    def forward(self, plan: StepPlan) -> None:
        self.runner.forward(plan)

    def sample(self, step: int, masks: GrammarMasks | None) -> Future[StepResult]:
        return StepFuture(self.runner.sample(step, masks).read)

    def control(self, command: Control) -> list[Reply]:
        if isinstance(command, WorkAhead):
            return [Reply(self.runner.work_ahead())]
        return [Reply(False, "a step that fails here is a test that fails")]

    def inspect_adapter(self, path: str) -> str:
        raise AssertionError("no test of a runner names an adapter")

    def on_failure(self, callback: Callable[[Failure], None]) -> None:
        """Never fails."""

    def close(self) -> None:
        """Nothing to close."""
