"""The worker: one model on one device. The same object in all executors."""

from __future__ import annotations

import ctypes
import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lmkit import memory
from lmkit.api import (
    CapacityError,
    Checkpoint,
    CheckpointError,
    Collectives,
    ConfigError,
    Control,
    DropAdapter,
    EngineError,
    ForgetRows,
    GrammarMasks,
    KVConfig,
    KVSpec,
    LmkitError,
    LoadAdapter,
    ModelInfo,
    NullCollectives,
    Profile,
    Reply,
    ResetCache,
    ResolvedPlan,
    SchedLimits,
    Sleep,
    StageWeights,
    StepLimits,
    StepPlan,
    UseWeights,
    Wake,
    WorkAhead,
    WorkerFacts,
    describe_model,
    owner_of,
)
from lmkit.checkpoint import stamp_of
from lmkit_layers.adapters import HEAD, Adapter
from torch import nn

from lmkit_worker.carry import carry
from lmkit_worker.chosen import choice_of, make
from lmkit_worker.compiles import Compiles
from lmkit_worker.loaded import LoadedModel
from lmkit_worker.loading.adapter import AdapterFiles, open_adapter
from lmkit_worker.loading.adapter_files import digest
from lmkit_worker.loading.adapter_places import BaseModel
from lmkit_worker.loading.convert import architecture_of
from lmkit_worker.loading.load import load_model
from lmkit_worker.loading.rules import Rules
from lmkit_worker.loading.update import Update
from lmkit_worker.profiling import Profiling
from lmkit_worker.runner import Runner, Unread

if TYPE_CHECKING:
    from lmkit.api import EngineConfig, Platform, Progress

log = logging.getLogger("lmkit.worker")


class Worker:
    """Loads the model of a resolved plan, then runs its steps through a Runner."""

    def __init__(
        self, config: EngineConfig, resolved: ResolvedPlan, checkpoint: Checkpoint, progress: Progress | None = None,
        rank: int = 0, places: Sequence[str] = (), debug_kv: bool = False,
    ) -> None:  # fmt: skip
        """`places`: where ranks meet, if there are several: those of each stage, then the stages of each part."""
        self.config, self.resolved, self.checkpoint, self.progress = config, resolved, checkpoint, progress
        self.rank, self.size, self.num_stages = rank, config.parallel.tp, config.parallel.pp
        self.places, self.debug_kv = places, debug_kv
        self.platform: Platform = make(choice_of(resolved, "platform"))
        self.info = memory.info_of_rank(describe_model(resolved, checkpoint), self.size, rank % self.size)
        self.layers = memory.stage(len(self.info.layers), rank // self.size, self.num_stages)  # that this rank has
        self.loaded: LoadedModel | None = None
        self.runner: Runner | None = None
        self.compiles = Compiles()
        self.adapters: dict[str, Adapter] = {}  # by id
        self.source: Update | None = None  # of all weights in force; None: the checkpoint
        self.mixed = False  # the weights in force are of several sources
        self._configured: tuple[KVConfig, SchedLimits] | None = None
        self._staged: tuple[LoadedModel, Update] | None = None
        self._profiling = Profiling(rank)

    def load(self) -> WorkerFacts:
        """Binds the device and loads the weights. Returns what is left for the KV cache."""
        started = time.monotonic()
        threads = self.config.parallel.threads
        self.device = self.platform.bind(self.rank, threads)
        if threads:
            torch.set_num_threads(threads)
        self.ranks, self.stages = self._collectives()
        self.stage = (self.layers, self.stages) if self.num_stages > 1 else None
        self._stamp = self._stamp_of_files()
        self.loaded = self._load()
        for group in (self.ranks, self.stages):
            group.all_reduce(torch.zeros(1, device=self.device))  # memory is counted when all have theirs
        dtype, block_size = self.resolved.value("dtype", self.info.dtype), self.resolved.value("block_size")
        specs = self._own(self.info.kv_specs(block_size, self.resolved.value("kv_dtype", dtype)))
        self.kv_specs = specs
        activations = self._step_bytes(specs, dtype)
        models = [self.loaded] + ([self.loaded.draft] if self.loaded.draft is not None else [])
        return WorkerFacts(
            free_kv_bytes=max(0, self.platform.free_memory() - activations),
            weight_bytes=sum(loaded.weight_bytes for loaded in models),
            activation_bytes=activations,
            kv_specs=specs,
            load_seconds=time.monotonic() - started,
            pack_seconds=sum(loaded.pack_seconds for loaded in models),
            warnings=tuple(warning for loaded in models for warning in loaded.warnings),
        )

    def _collectives(self) -> tuple[Collectives, Collectives]:
        """Those of ranks that have parts of the same layers, and of ranks that have the same part of others."""
        stage, part = divmod(self.rank, self.size)
        places = iter(self.places)
        stages = [next(places) for _ in range(self.num_stages)] if self.size > 1 else []
        parts = [next(places) for _ in range(self.size)] if self.num_stages > 1 else []
        # A platform of one rank need not know of places.
        ranks = self.platform.collectives(part, self.size, *stages[stage : stage + 1])
        if self.num_stages == 1:
            return ranks, NullCollectives()
        return ranks, self.platform.collectives(stage, self.num_stages, *parts[part : part + 1])

    def _own(self, specs: Sequence[KVSpec]) -> tuple[KVSpec, ...]:
        """The same groups, with what this rank's layers keep; there may be none."""

        def own(spec: KVSpec) -> KVSpec:
            layers = tuple(layer for layer in spec.layers if layer in self.layers)
            size = spec.bytes_per_block // len(spec.layers) * len(layers)
            if spec.recurrent:
                size = sum(t.nbytes for layer in layers for t in self.info.layers[layer].state)
            return replace(spec, layers=layers, bytes_per_block=size)

        return tuple(own(spec) for spec in specs)

    def _step_bytes(self, specs: tuple[KVSpec, ...], dtype: str) -> int:
        """What the largest steps take beside weights and cache: measured, with what planners keep and buffers hold, and
        adapters that may come; or estimated where the platform does not measure."""
        config, info, max_tokens = self.config, self.info, memory.step_tokens(self.config)
        grows = sum(spec.bytes_per_token for spec in specs if spec.kind == "full")
        most = max(max_tokens, self.platform.free_memory() // grows) if grows else info.max_length
        limits = SchedLimits(
            max_tokens=max_tokens, max_rows=config.sched.rows,
            max_length=config.model.max_length or min(info.max_length, most),
            lookahead=memory.num_drafts(config, self.resolved, info),
        )  # fmt: skip
        try:
            taken = self.platform.measure(lambda: self._runner(KVConfig(specs, (2,) * len(specs)), limits).largest())
        except torch.OutOfMemoryError as e:
            raise CapacityError(
                f"a step of {limits.max_tokens} tokens and {limits.max_rows} rows does not fit beside the weights "
                f"({self.loaded.weight_bytes if self.loaded else 0} bytes): {str(e).splitlines()[0]}",
                fix="use a smaller --max-step-tokens, --max-rows or model",
            ) from None
        if taken is None:
            taken = memory.activation_bytes(info, dtype, limits.max_tokens, limits.max_rows)
        return taken + memory.adapter_bytes(info, config, dtype)

    def _load(self) -> LoadedModel:
        """The model, and the draft that its proposer runs: layers of one cache."""

        def load(plan: ResolvedPlan, checkpoint: Checkpoint, info: ModelInfo, first: int, **more: Any) -> LoadedModel:
            return load_model(
                plan, checkpoint, info, self.platform, self.device, self.ranks,
                progress=self.progress, packed_cache=self.config.model.packed_cache, cache=(self.info, first),
                deals=self.config.parallel.ep, **more,
            )  # fmt: skip

        draft, info = self.resolved.draft, self.info
        drafted = describe_model(draft.plan, draft.checkpoint) if draft is not None else None
        first = len(info.layers) - (len(drafted.layers) if drafted is not None else 0)
        own = replace(info, layers=info.layers[:first])
        loaded = load(
            self.resolved,
            self.checkpoint,
            own,
            0,
            adapters=self.config.lora.on,
            update=self.source,
            stage=self.stage,
        )
        loaded.info = self._run_info()
        if draft is not None and drafted is not None:
            loaded.draft = load(draft.plan, draft.checkpoint, drafted, first, attention=loaded.attention)
        return loaded

    def _run_info(self) -> ModelInfo:
        """The model as it is run here: layers of other ranks keep no state."""
        layers = (layer if layer.index in self.layers else replace(layer, state=()) for layer in self.info.layers)
        return self.info if self.num_stages == 1 else replace(self.info, layers=tuple(layers))

    def _proposer(self, loaded: LoadedModel) -> Any:
        choice = self.resolved.choice("proposer")
        if choice is None or loaded.draft is None:
            return None if choice is None else make(choice)
        return make(choice, loaded.draft.model, loaded.model)

    def configure_kv(self, kv: KVConfig, limits: SchedLimits) -> None:
        self._configured = kv, limits
        own = kv if self.num_stages == 1 else KVConfig(self.kv_specs, kv.num_blocks)
        self.runner = self._runner(own, limits)
        for adapter in self.adapters.values():
            self.runner.adapters.load(adapter)
        self.runner.warm()
        self.compiles.listen()  # from now on each is one too many

    def _runner(self, kv: KVConfig, limits: SchedLimits) -> Runner:
        if self.loaded is None:
            raise EngineError("configure_kv before load")
        attention = self.loaded.attention
        backends = [attention] * len(self.info.kv_groups()) if attention is not None else []
        block_size = min(spec.block_size for spec in kv.specs)
        sizes = StepLimits(
            max_rows=limits.max_rows,
            max_tokens=limits.max_tokens,
            max_blocks_per_row=-(-(limits.max_length + limits.lookahead + 1) // block_size),
            max_length=limits.max_length,
        )
        return Runner(
            self.loaded, kv, sizes, backends, self.platform, self.device,
            eos_token_ids=limits.eos_token_ids, max_drafts=limits.lookahead,
            seed=self.config.model.seed, debug_kv=self.debug_kv,
            processors={c.name: make(c) for c in self.resolved.choices if c.kind == "logits_processor"},
            proposer=self._proposer(self.loaded),
            proposer_owner="" if (choice := self.resolved.choice("proposer")) is None else owner_of(choice),
        )  # fmt: skip

    def forward(self, plan: StepPlan) -> None:
        self._profiling.step()
        self._running.forward(plan)

    def sample(self, step: int, masks: GrammarMasks | None) -> Unread:
        unread = self._running.sample(step, masks)
        if names := self.compiles.take():
            log.warning("step %d waited for kernels that were compiled: %s", step, ", ".join(names))
            unread.result.compiled = names
        return unread

    def told(self, step: int, tokens: Sequence[Sequence[int]]) -> None:
        """What another rank drew for the rows of a step."""
        self._running.told(step, tokens)

    def control(self, command: Control) -> Reply:
        """Commands this worker does not know are refused by name."""
        match command:
            case ForgetRows() | ResetCache():
                self._running.reset()
                return Reply(True)
            case WorkAhead():
                return self._work_ahead()
            case LoadAdapter(id, path):
                return self._load_adapter(id, path)
            case Profile(path, num_steps):
                return self._profiling.set(path, num_steps)
            case DropAdapter(id):
                self.adapters.pop(id, None)
                if self.runner is not None:  # else it sleeps
                    self.runner.adapters.drop(id)
                return Reply(True)
            case Sleep(level):
                return _answer(lambda: self._sleep(level))
            case Wake():
                return _answer(self._wake)
            case StageWeights(path, stamp, partial):
                return _answer(lambda: self._stage(Update(Path(path), stamp, partial)))
            case UseWeights(commit):
                return _answer(lambda: self._use(commit))
        return Reply(False, f"{type(command).__name__} is not supported by this worker")

    def _work_ahead(self) -> Reply:
        """What fails is said in the log, and tried again by the step that needs it."""
        try:
            if self._running.work_ahead():
                self.compiles.take()  # no request waited for them
                return Reply(True)
        except Exception:
            log.exception("a decode step could not be captured ahead")
        return Reply(False, "nothing is left to be done ahead")

    def inspect_adapter(self, path: str) -> str:
        self._open_adapter(path)
        return digest(Path(path))

    def _open_adapter(self, path: str) -> AdapterFiles:
        base = base_model(self.resolved, self.checkpoint, self.info)
        return open_adapter(path, self.info, self.config.lora.max_rank, base)

    def _load_adapter(self, id: str, path: str) -> Reply:
        try:
            files = self._open_adapter(path)
            dtype = getattr(torch, self.resolved.value("dtype", self.info.dtype))
            weights = files.read(dtype)
            deltas = {name: found for name, found in weights.deltas.items() if self._has(name)}
            adapter = Adapter(id, deltas, {name: w for name, w in weights.whole.items() if self._has(name)})
            self._running.adapters.load(adapter)
            self.adapters[id] = adapter
        except LmkitError as e:
            return Reply(False, f"{e.message}; {e.fix}" if e.fix else e.message)
        return Reply(True)

    def _has(self, module: str) -> bool:
        """Whether this rank runs it: another stage may."""
        if self.num_stages == 1:
            return True
        if module.startswith("layers."):
            return int(module.split(".")[1]) in self.layers
        return self.layers.stop == len(self.info.layers) if module == HEAD else self.layers.start == 0

    def close(self) -> None:
        """Drops model and cache. Idempotent."""
        self._profiling.end()
        self._profiling.close()
        self.runner = self.loaded = self._staged = None

    # -------------------------------------------------------------------------------------------- life

    def _sleep(self, level: int) -> None:
        if level not in (1, 2):
            raise ConfigError(f"there is no level {level} of sleep", fix="1: weights to the host's memory; 2: dropped")
        if level == 2 and self.mixed:
            raise ConfigError("the weights are of several updates: no file has them all", fix="sleep at level 1")
        self._check_awake()
        self.runner = None
        if level == 2:
            self.loaded = None
        elif self.device.type != "cpu":
            carry(self._models(), torch.device("cpu"))
        free_memory()

    def _wake(self) -> None:
        """What stops it leaves the worker asleep."""
        assert self._configured is not None, "it slept"
        dropped = self.loaded is None
        try:
            if dropped:
                self._check_source()
                self.loaded = self._load()
                self._check_source()
            elif self.device.type != "cpu":
                carry(self._models(), self.device)
            self.configure_kv(*self._configured)
        except BaseException:
            self.runner = None
            if dropped:
                self.loaded = None
            elif self.device.type != "cpu":
                carry(self._models(), torch.device("cpu"))
            free_memory()
            raise

    def _models(self) -> list[nn.Module]:
        found = [self.loaded, self.loaded.draft if self.loaded is not None else None]
        parts = [part for loaded in found if loaded is not None for part in (loaded.model, loaded.dense)]
        return [part for part in parts if isinstance(part, nn.Module)]

    def _stage(self, update: Update) -> None:
        """Beside what runs, so that nothing has happened where anything is wrong."""
        assert self.loaded is not None
        self._check_awake()
        update.check()
        own = replace(self.info, layers=self.info.layers[: self._num_own_layers()])
        staged = load_model(
            self.resolved, self.checkpoint, own, self.platform, self.device, self.ranks, progress=self.progress,
            cache=(self.info, 0), adapters=self.config.lora.on, attention=self.loaded.attention, update=update,
            base=self.loaded, stage=self.stage, deals=self.config.parallel.ep,
        )  # fmt: skip
        update.check()
        staged.info, staged.draft = self._run_info(), self.loaded.draft
        for warning in staged.warnings:
            log.warning("%s: %s", update.path, warning)
        self._staged = staged, update

    def _use(self, commit: bool) -> None:
        staged, self._staged = self._staged, None
        if not commit:
            return
        assert staged is not None, "nothing was staged"
        assert self._configured is not None
        self.runner = None
        self.loaded, update = staged
        self.mixed = update.partial
        self.source = None if update.partial else update
        free_memory()
        self.configure_kv(*self._configured)

    def _num_own_layers(self) -> int:
        drafted = self.loaded.draft if self.loaded is not None else None
        return len(self.info.layers) - (len(drafted.info.layers) if drafted is not None else 0)

    def _stamp_of_files(self) -> str:
        return stamp_of(self.checkpoint.path, self.checkpoint.files) if self.checkpoint.files else ""

    def _check_source(self) -> None:
        """Raises CheckpointError unless what the weights in force were read from is what it was."""
        if self.source is not None:
            self.source.check()
        elif self._stamp_of_files() != self._stamp:
            raise CheckpointError(f"{self.checkpoint.path} has changed since", fix="start the engine anew")

    def _check_awake(self) -> None:
        if self.runner is None:
            raise EngineError("the worker is not configured, asleep, or closed")

    @property
    def _running(self) -> Runner:
        self._check_awake()
        assert self.runner is not None
        return self.runner


def _answer(work: Callable[[], None]) -> Reply:
    """What stops it, in words."""
    try:
        work()
    except LmkitError as e:
        return Reply(False, f"{e.message}; {e.fix}" if e.fix else e.message)
    except (MemoryError, torch.OutOfMemoryError) as e:
        return Reply(False, f"there is not enough memory ({type(e).__name__})")
    except Exception as e:  # all ranks are to answer
        log.error("a change failed", exc_info=e)
        return Reply(False, f"it failed ({type(e).__name__}); the engine's log has the cause")
    return Reply(True)


def free_memory() -> None:
    """Gives back what torch keeps of memory on a device, and the C library of the host's."""
    gc.collect()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc has it
        trim(0)
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def base_model(resolved: ResolvedPlan, checkpoint: Checkpoint, info: ModelInfo) -> BaseModel:
    """What adapters need to know of the model that they are for."""
    loader = make(choice_of(resolved, "loader"))
    rules = Rules(architecture_of(resolved).weights(info))
    entries = {rules.named(entry.name): entry for entry in loader.tensors(checkpoint)}
    return BaseModel(rules, loader, entries)
