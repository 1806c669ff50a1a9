"""Whole engines without torch, for tests of everything around them: clients, servers, supervision.

`hash_engine` has the signature of `lmkit.engine.build.build_engine`; HASH_FACTORY names it, so that it also runs in an
engine process. Options: `config.plugins["executor.hash"]`, see HashOptions.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from time import sleep

from lmkit.api import Checkpoint, CheckpointError, DeviceInfo, Progress, RequestView, ResolvedPlan, SchedLimits
from lmkit.config import EngineConfig
from lmkit.engine.beam import BeamCore
from lmkit.engine.intake import Intake
from lmkit.engine.loop import Engine
from lmkit.engine.messages import EngineFacts
from lmkit.scheduling.request import Request
from lmkit.scheduling.scheduler import Scheduler

from lmkit_testing.hash_model import HashExecutor, hash_kv

HASH_FACTORY = "lmkit_testing.engines:hash_engine"


@dataclass(frozen=True, slots=True)
class HashOptions:
    """How the engine behaves."""

    delay: float = 0.0  # seconds per step
    num_blocks: int = 4096
    block_size: int = 16
    vocab_size: int = 97
    max_length: int = 4096
    start_seconds: float = 0.0  # how long start-up takes
    start_error: str = ""  # message of the CheckpointError that start-up raises
    crash_at: int = 0  # the step at which the engine raises; 0 = never
    hang_at: int = 0  # the step that never ends; 0 = never
    poison: int = -1  # the process disappears when a request runs that has this token in its prompt
    poison_after: int = 0  # tokens that this request gets before
    exit_at: int = 0  # the step at which the whole process disappears; 0 = never


class Fcfs:
    """First come, first served."""

    def admit_key(self, r: RequestView) -> tuple:
        return (r.priority, r.arrival, r.order)

    def victim_key(self, r: RequestView) -> tuple:
        return self.admit_key(r)


class _Faulty(BeamCore):
    """A step loop that fails at a given step."""

    def __init__(self, options: HashOptions, scheduler: Scheduler, executor: HashExecutor, intake: Intake) -> None:
        super().__init__(scheduler, executor, intake)
        self._options, self._steps, self._running = options, 0, scheduler.running

    def step(self) -> list:
        self._steps += 1
        if self._steps == self._options.crash_at:
            raise RuntimeError("injected crash")
        if self._steps == self._options.hang_at:
            sleep(3600)
        if self._steps == self._options.exit_at or any(map(self._is_poison, self._running)):
            sys.exit(17)
        return super().step()

    def _is_poison(self, r: Request) -> bool:
        return r.num_output >= self._options.poison_after and self._options.poison in r.tokens[: r.num_prompt_tokens]


def hash_engine(
    config: EngineConfig, resolved: ResolvedPlan, checkpoint: Checkpoint, progress: Progress | None = None
) -> Engine:
    """An engine on the hash-model. Raises CheckpointError when told to."""
    options = HashOptions(**config.plugins.get("executor.hash", {}))  # type: ignore[arg-type]
    if progress is not None:
        progress("load weights", 1, 2)
    sleep(options.start_seconds)
    if options.start_error:
        raise CheckpointError(options.start_error, fix="use another checkpoint")
    if progress is not None:
        progress("load weights", 2, 2)
    kv = hash_kv(options.num_blocks, options.block_size)
    executor = HashExecutor(kv, depth=config.parallel.in_flight, vocab_size=options.vocab_size, delay=options.delay)
    limits = SchedLimits(
        max_tokens=config.sched.max_tokens or 512,
        max_rows=config.sched.rows,
        max_length=options.max_length,
        depth=config.parallel.in_flight,
        max_waiting=config.sched.queue,
        prefix_cache=config.cache.prefix_cache is not False,
    )
    intake = Intake(vocab_size=options.vocab_size, max_length=options.max_length)
    core = _Faulty(options, Scheduler(limits, kv, Fcfs()), executor, intake)
    facts = EngineFacts(
        model=next(iter(config.model.names), checkpoint.name),
        max_length=options.max_length,
        num_kv_tokens=kv.num_tokens,
        vocab_size=options.vocab_size,
        block_size=options.block_size,
        max_rows=limits.max_rows,
        max_waiting=config.sched.max_waiting or 0,
        device="hash-model",
        kv_bytes=kv.nbytes,
        phases=(("load weights", options.start_seconds),),
    )
    return Engine(core, facts, executor.close)


def hash_config(config: EngineConfig | None = None, **options: object) -> EngineConfig:
    """A configuration for `hash_engine`; `options` are fields of HashOptions."""
    from dataclasses import replace

    config = config or EngineConfig()
    return replace(config, plugins={**config.plugins, "executor.hash": options})


def no_plan() -> ResolvedPlan:
    """A plan that chooses nothing, for engines that need no plugin."""
    return ResolvedPlan(DeviceInfo(platform="none", device_type="cpu"), ())


def no_checkpoint(name: str = "hash-model") -> Checkpoint:
    return Checkpoint(ref=name, path=Path("."), format="none", config={})
