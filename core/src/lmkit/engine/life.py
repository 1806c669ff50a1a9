"""Life: what is done to a running engine between two steps: pauses, sleep, new weights, profiles.

It belongs to the engine thread.

running -> finishing -> paused     requests that are there end; those that come wait
running -> pausing   -> paused     no step is begun; those in flight are taken in
paused  -> asleep    -> paused     cache, and perhaps weights, are given up and come back
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

from lmkit.api import (
    CheckpointError,
    ConfigError,
    Control,
    EngineDead,
    ErrorInfo,
    Failure,
    Profile,
    RequestError,
    Sleep,
    StageWeights,
    UseWeights,
    Wake,
)
from lmkit.engine.messages import Act, ForgetPrefixes, LifeState, Pause, Resume, SetProfile, UpdateWeights

if TYPE_CHECKING:
    from collections import deque

    from lmkit.api import Executor, SchedStats, Scheduler
    from lmkit.engine.intake import Intake


class Steps(Protocol):
    """What it needs of engine.core.EngineCore."""

    scheduler: Scheduler
    executor: Executor
    intake: Intake
    pending: deque[Any]  # steps in flight
    failure: Failure | None

    def stats(self) -> SchedStats: ...


class PauseGate:
    """Closed for requests that come while those before them are to end."""

    name = "pause"
    opened = False

    def ready(self) -> bool:
        return self.opened

    def error(self) -> ErrorInfo | None:
        return None


class Life:
    """The state of one engine."""

    def __init__(self, core: Steps) -> None:
        self._core = core
        self.state: LifeState = "running"
        self.gate = PauseGate()  # of the pause of the moment, or of the next one
        self.late: set[str] = set()  # requests behind the gate

    @property
    def settled(self) -> bool:
        """Nothing has to be done for the state to be reached."""
        return self.state not in ("finishing", "pausing")

    @property
    def holds(self) -> bool:
        """No step is begun."""
        return self.state in ("pausing", "paused", "asleep")

    def look(self) -> None:
        """Before each step: whether what a pause waits for is over."""
        if self.settled or self._core.pending:
            return
        stats = self._core.stats()
        if self.state == "pausing" or stats.num_waiting + stats.num_running == len(self.late):
            self.state = "paused"

    def apply(self, act: Act) -> None:
        """Raises ConfigError, or CheckpointError for weights, and then nothing has changed; EngineDead else."""
        core = self._core
        match act:
            case Pause(finish):
                if self.state == "running" or (self.state == "finishing" and not finish):
                    self.state = "finishing" if finish else "pausing"
                self.look()
            case Resume():
                if self.state == "asleep":
                    raise ConfigError("the engine is asleep", fix="wake it")
                self.state = "running"
                self.gate.opened, self.gate = True, PauseGate()
                self.late.clear()
            case ForgetPrefixes():
                self._forget(None)
            case SetProfile(path, num_steps):
                replies = core.executor.control(Profile(path, num_steps))
                if bad := next((reply for reply in replies if not reply.ok), None):
                    raise RequestError(bad.message)
            case Sleep():
                forget = self._from("paused")
                self._tell(act)
                self.state = "asleep"
                forget(core.intake.root)
            case Wake():
                self._from("asleep")
                self._tell(act)
                self.state = "paused"
            case UpdateWeights(path, stamp, partial):
                forget = self._from("paused")
                replies = core.executor.control(StageWeights(path, stamp, partial))
                if bad := next((reply for reply in replies if not reply.ok), None):
                    core.executor.control(UseWeights(commit=False))
                    raise CheckpointError(bad.message)
                self._tell(UseWeights())
                name = sha256(f"{core.intake.fingerprint}\n{path}\n{stamp}".encode()).hexdigest()
                core.intake = replace(core.intake, fingerprint=name)
                forget(core.intake.root)

    def _from(self, state: LifeState) -> Any:
        """What forgets the cache, where the engine is in that state."""
        if self.state != state:
            raise ConfigError(f"the engine is {self.state}, and has to be {state}", fix="pause or wake it first")
        return self._forget

    @property
    def _forget(self) -> Any:
        found = getattr(self._core.scheduler, "forget_cache", None)
        if found is None:
            raise ConfigError("the scheduler cannot forget its cache (forget_cache)", fix="--scheduler fcfs")
        return found

    def _tell(self, control: Control) -> None:
        """All workers do it, or none; else the engine ends."""
        name = type(control).__name__
        try:
            replies = self._core.executor.control(control)
        except Exception as e:
            self._core.failure = Failure(0, f"{name} failed: {type(e).__name__}")
            raise EngineDead(self._core.failure.message, fix="the engine's log has the cause") from e
        refused = [(rank, reply.message) for rank, reply in enumerate(replies) if not reply.ok]
        if len(refused) == len(replies) and not isinstance(control, UseWeights):
            raise ConfigError(refused[0][1])
        if refused:
            self._core.failure = Failure(*refused[0])
            raise EngineDead(f"{name} was not done by all workers: {refused[0][1]}")
