"""Engine assembly: from a resolved plan to an engine that is ready. Runs where the engine thread will run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

from lmkit import memory
from lmkit.api import (
    Checkpoint,
    ConfigError,
    Executor,
    KVConfig,
    KVConnector,
    ModelInfo,
    Progress,
    ResolvedPlan,
    SchedLimits,
    Scheduler,
    StructuredOutput,
    Tokenizer,
    Vocabulary,
    WorkerFacts,
    blaming,
    describe_model,
    make_target,
    owner_of,
)
from lmkit.config import EngineConfig
from lmkit.engine.adapters import Adapters, NoAdapters, parse_modules
from lmkit.engine.beam import BeamCore
from lmkit.engine.intake import Intake, NoStructuredOutput
from lmkit.engine.loop import Engine
from lmkit.engine.messages import EngineFacts
from lmkit.logs import write_json
from lmkit.plugins import load_target, verify
from lmkit.plugins.proposals import settled
from lmkit.scheduling.outside import GuardedConnector


class Phases:
    """Start-up, phase by phase. What lies between phases counts to the next one, so the sum is the whole time."""

    def __init__(self) -> None:
        self.seconds: list[tuple[str, float]] = []
        self._since = perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        yield
        now = perf_counter()
        self.seconds.append((name, now - self._since))
        self._since = now

    def split(self, name: str, seconds: float) -> None:
        """`seconds` of the last phase had a name of their own."""
        last, whole = self.seconds.pop()
        self.seconds += [(last, whole - seconds), (name, seconds)]


def build_engine(
    config: EngineConfig, resolved: ResolvedPlan, checkpoint: Checkpoint, progress: Progress | None = None,
    tokenizer: Tokenizer | None = None,
) -> Engine:  # fmt: skip
    """Starts the executor, plans and allocates the KV cache, and puts the step loop on top.

    `tokenizer`: where this process has it already, for the vocabulary of grammars; else it is loaded when one comes.

    Raises ConfigError, CheckpointError, CapacityError, PluginError; then nothing is left running.
    """
    with blaming(resolved.all_choices(), in_full=True):
        return _built(config, resolved, checkpoint, progress, tokenizer)


def _built(
    config: EngineConfig, resolved: ResolvedPlan, checkpoint: Checkpoint, progress: Progress | None,
    tokenizer: Tokenizer | None,
) -> Engine:  # fmt: skip
    if resolved.device.described:
        raise ConfigError(
            f"the device {config.device!r} is only described: there is nothing to run on",
            fix="leave --device out; it is for explain and plan",
        )
    if config.log_level is not None:
        logging.getLogger("lmkit").setLevel(config.log_level.upper())
    if config.log_format == "json":
        write_json()
    config = settled(config, resolved)
    phase = Phases()
    with phase("model"):
        verify(resolved)
        info = describe_model(resolved, checkpoint)
        executor: Executor = make_target(_chosen(resolved, "executor"), config, resolved, checkpoint, progress)
    try:
        with phase("load weights"):
            facts = executor.start()
        phase.split("pack weights", min(facts.pack_seconds, facts.load_seconds))
        with phase("KV cache"):
            kv = memory.plan_kv(facts, config, max_length=info.max_length, causal=info.causal)
            limits = _limits(config, resolved, info, kv, executor.depth)
            executor.configure_kv(kv, limits)
        with phase("scheduler"):
            constrained = _constrained_output(config, resolved, checkpoint, info, limits, tokenizer)
            adapters = Adapters(executor, config.lora.max_adapters) if config.lora.on else NoAdapters()
            intake = _intake(resolved, checkpoint, info, limits.max_length, constrained)
            intake = replace(intake, adapters=adapters.loaded)
            connector = _connector(resolved, checkpoint, kv)
            if connector is not None:  # engines on other hosts know the model by its content, not by its path
                intake = replace(intake, fingerprint=connector.fingerprint)
            scheduler = _scheduler(resolved, limits, kv, connector)
            core = BeamCore(scheduler, executor, intake, adapters=adapters, eos_token_ids=limits.eos_token_ids)
            core.choices = resolved.all_choices()
        with phase("adapters"):
            for name, path in parse_modules(config.lora.modules):
                adapters.load(name, path)
    except BaseException:
        executor.close()
        raise
    shown = _facts(config, resolved, checkpoint, info, facts, kv, limits, tuple(phase.seconds))

    def close() -> None:
        constrained.close()
        executor.close()
        if connector is not None:
            connector.close()

    return Engine(core, shown, close)


def executor_of(resolved: ResolvedPlan) -> Any:
    """The chosen executor's class. Imports what runs models, which takes its time: worth doing beside other work."""
    return load_target(_chosen(resolved, "executor"))


def _chosen(resolved: ResolvedPlan, kind: str) -> Any:
    choice = resolved.choice(kind)
    if choice is None:
        raise ConfigError(f"no {kind} was chosen", fix=f"lmkit explain {kind}")
    return choice


def _limits(config: EngineConfig, resolved: ResolvedPlan, info: ModelInfo, kv: KVConfig, depth: int) -> SchedLimits:
    tokens = memory.step_tokens(config)
    length = memory.fit_length(info, kv, tokens, resolved.value("max_length") or config.model.max_length)
    if not info.causal:  # a prompt is computed in one step
        length = min(length, tokens)
    return SchedLimits(
        max_tokens=tokens,
        max_rows=config.sched.rows,
        max_length=length,
        eos_token_ids=tuple(resolved.value("eos_token_ids", info.eos_token_ids)),
        prefix_cache=resolved.value("prefix_cache", True),
        whole_prompts=not info.causal,
        lookahead=memory.num_drafts(config, resolved, info),
        depth=depth,
        apart=config.parallel.pp > 1,
        max_waiting=config.sched.queue,
    )


def _connector(resolved: ResolvedPlan, checkpoint: Checkpoint, kv: KVConfig) -> KVConnector | None:
    choice = resolved.choice("kv_connector")
    return (
        None
        if choice is None
        else GuardedConnector(make_target(choice, checkpoint, resolved, kv), owner_of(choice), kv)
    )


def _scheduler(resolved: ResolvedPlan, limits: SchedLimits, kv: KVConfig, connector: KVConnector | None) -> Scheduler:
    """The chosen plugin provides the order (usual) or a whole scheduler."""
    from lmkit.scheduling.scheduler import Scheduler as DefaultScheduler

    choice = _chosen(resolved, "scheduler")
    target = load_target(choice)
    if hasattr(target, "schedule"):
        if connector is not None:
            raise ConfigError(f"the scheduler {choice.name} asks no KV connector", fix="--kv-connector none")
        if limits.apart and limits.depth > 1 and not getattr(target, "apart", False):
            raise ConfigError(f"the scheduler {choice.name} gives steps in flight the same rows", fix="--depth 1")
        scheduler: Scheduler = make_target(choice, limits, kv)
        return scheduler
    return DefaultScheduler(limits, kv, make_target(choice), connector=connector, owner=owner_of(choice))


def _constrained_output(
    config: EngineConfig, resolved: ResolvedPlan, checkpoint: Checkpoint, info: ModelInfo, limits: SchedLimits,
    tokenizer: Tokenizer | None,
) -> StructuredOutput:  # fmt: skip
    """Loads nothing before the first constraint comes, and then only what the plan names."""

    def open_vocabulary() -> Vocabulary:
        from lmkit.text.side import load_tokenizer, vocabulary

        found = tokenizer or load_tokenizer(checkpoint, resolved, config)
        return vocabulary(found, limits.eos_token_ids, info.vocab_size)

    choice = resolved.choice("structured_output")
    if choice is None:
        return NoStructuredOutput()
    backends = [c for c in resolved.choices if c.kind == "grammar"]
    output: StructuredOutput = make_target(
        choice, backends, open_vocabulary, limits.max_rows if limits.lookahead else 0
    )
    return output


def _intake(
    resolved: ResolvedPlan, checkpoint: Checkpoint, info: ModelInfo, length: int, grammars: StructuredOutput
) -> Intake:
    return Intake(
        vocab_size=info.vocab_size,
        max_length=length,
        fingerprint=f"{checkpoint.path}@{checkpoint.revision}:{resolved.hash}",
        kv_dtype=str(resolved.value("kv_dtype", "")),
        grammars=grammars,
        pooler=info.pooler,
        processors={c.name: load_target(c).options for c in resolved.choices if c.kind == "logits_processor"},
    )


def _facts(
    config: EngineConfig,
    resolved: ResolvedPlan,
    checkpoint: Checkpoint,
    info: ModelInfo,
    facts: WorkerFacts,
    kv: KVConfig,
    limits: SchedLimits,
    phases: tuple[tuple[str, float], ...],
) -> EngineFacts:
    return EngineFacts(
        model=next(iter(config.model.names), checkpoint.name),
        max_length=limits.max_length,
        num_kv_tokens=kv.num_tokens,
        vocab_size=info.vocab_size,
        block_size=kv.specs[0].block_size,
        max_rows=limits.max_rows,
        max_waiting=config.sched.max_waiting or 0,
        eos_token_ids=limits.eos_token_ids,
        pooler=info.pooler,
        adapters=tuple(name for name, _ in parse_modules(config.lora.modules)),
        loads_adapters=config.lora.enabled,
        max_adapters=config.lora.max_adapters if config.lora.on else 0,
        dtype=str(resolved.value("dtype", info.dtype)),
        device=resolved.device.name or resolved.device.platform,
        process_bytes=resolved.device.process_bytes,
        num_ranks=config.parallel.tp * config.parallel.pp,
        weight_bytes=facts.weight_bytes,
        activation_bytes=facts.activation_bytes,
        kv_bytes=kv.nbytes,
        phases=phases,
        warnings=facts.warnings,
    )
