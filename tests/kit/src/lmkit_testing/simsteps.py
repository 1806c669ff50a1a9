"""Steps of real models on the simulated device, with the plugins that a described GPU gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from lmkit.api import EngineRequest, KVConfig, NullCollectives, SamplingParams, SchedLimits, StepLimits, describe_model
from lmkit.config import from_options
from lmkit.engine.core import EngineCore
from lmkit.engine.intake import Intake
from lmkit.plugins.resolve import resolve
from lmkit.scheduling.scheduler import Scheduler
from lmkit_layers.adapter_tables import Delta
from lmkit_layers.adapters import Adapter
from lmkit_layers.embedding import Embedding
from lmkit_layers.linear import Linear
from lmkit_worker.loading.load import load_model
from lmkit_worker.runner import Runner
from torch import nn

from lmkit_testing.one_runner import OneRunner
from lmkit_testing.stepper import ArrivalOrder

MAX_LENGTH = 64
ROWS = 3  # padded to 4
STEADY = SchedLimits(max_tokens=32, max_rows=8, max_length=MAX_LENGTH, eos_token_ids=(1,), depth=2)


def runner(
    folder: Path, platform, device: torch.device, limits: SchedLimits, attention: str = "torch", op: str = "auto",
    **more: str,
) -> tuple[Runner, KVConfig]:  # fmt: skip
    """With the plugins that a described GPU gets, on whatever `device` is."""
    options = {"model": str(folder), "max_length": MAX_LENGTH, "device": "cuda:9.0:141GB", "attention": attention}
    config = from_options({**options, "dtype": "float32", "op": op, **more})
    plan, checkpoint, _ = resolve(config)
    info = describe_model(plan, checkpoint)
    loaded = load_model(plan, checkpoint, info, platform, device, NullCollectives())
    specs = tuple(info.kv_specs(16, more.get("kv_dtype", "float32")))
    kv = KVConfig(specs, (40,) * len(specs))
    sizes = StepLimits(limits.max_rows, limits.max_tokens, 8, MAX_LENGTH)
    backends = [loaded.attention] * len(info.kv_groups()) if loaded.attention is not None else []
    return Runner(loaded, kv, sizes, backends, platform, device, debug_kv=True), kv


def tokens(made: Runner, kv: KVConfig, limits: SchedLimits, requests: list[EngineRequest]) -> dict[str, list[int]]:
    core = EngineCore(Scheduler(limits, kv, ArrivalOrder()), OneRunner(made, limits.depth), Intake(512, MAX_LENGTH))
    found: dict[str, list[int]] = {r.id: [] for r in requests}
    waiting = list(requests)
    while waiting or core.has_work():
        if waiting:  # they come one by one: rows begin and end at different steps
            core.add(waiting.pop(0))
        for event in core.step():
            assert event.error is None, event.error
            found[event.id] += event.tokens
    made.check()
    return found


def requests(params: list[SamplingParams]) -> list[EngineRequest]:
    return [EngineRequest(f"r{i}", [5 + i, 6, 7, 8, 9 + i], p) for i, p in enumerate(params)]


def adapter(model: nn.Module, id: str, rank: int) -> Adapter:
    """Random, for every linear and for the embedding; of the same id and rank always the same."""
    generator = torch.Generator().manual_seed(len(id) * 100 + rank)

    def delta(low: int, high: int, width: int) -> Delta:
        a, b = (torch.randn(shape, generator=generator) * 0.2 for shape in ((width, rank), (rank, high - low)))
        return Delta(low, high, a, b)

    deltas: dict[str, list[Delta]] = {}
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            ends = list(accumulate(module.spec.out_features, initial=0))
            deltas[module.spec.name] = [delta(low, high, module.spec.in_features) for low, high in pairwise(ends)]
        elif isinstance(module, Embedding):
            deltas[path] = [delta(0, module.weight.shape[1], module.weight.shape[0])]
    return Adapter(id, deltas, {})


def play(
    checkpoint: Path, platform, device: torch.device, params: SamplingParams, depth: int = 2,
    adapters: Sequence[str | None] = (None,) * ROWS, made: Runner | None = None, **more: str,
) -> Iterator[list]:  # fmt: skip
    """The events of each step of some equal requests, each with its adapter, on `made` or a runner of their own.

    `more`: options of that runner.
    """
    limits = SchedLimits(**{name: getattr(STEADY, name) for name in STEADY.__dataclass_fields__} | {"depth": depth})
    if made is None:
        made, kv = runner(checkpoint, platform, device, limits, "triton", **more)
    kv, named = made.kv_config, {name for name in adapters if name}
    for rank, name in enumerate(sorted(named), 2):
        if name not in made.adapters.loaded:
            assert isinstance(made.model, nn.Module)
            made.adapters.load(adapter(made.model, name, rank))
    intake = Intake(512, MAX_LENGTH, adapters=dict.fromkeys(named, lambda: None))
    core = EngineCore(Scheduler(limits, kv, ArrivalOrder()), OneRunner(made, depth), intake)
    for i, held in enumerate(adapters):
        core.add(EngineRequest(f"r{i}", [5 + i, 6, 7], params, adapter=held))
    while core.has_work():
        yield core.step()


def played(steps: Iterator[list]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for events in steps:
        for event in events:
            assert event.error is None, event.error
            found.setdefault(event.id, []).extend(event.tokens)
    return found
