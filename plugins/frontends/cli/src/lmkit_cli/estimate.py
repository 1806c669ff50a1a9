"""What would fit on a device, from facts alone: the budget that `lmkit plan` prints. Nothing is loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from lmkit.api import (
    CapacityError,
    Checkpoint,
    DeviceInfo,
    ModelInfo,
    ResolvedPlan,
    WorkerFacts,
    describe_model,
    itemsize,
)
from lmkit.config import EngineConfig, format_size
from lmkit.memory import (
    activation_bytes,
    adapter_bytes,
    fit_length,
    info_of_rank,
    plan_kv,
    stage,
    step_tokens,
    weight_bytes,
)
from lmkit.plugins.proposals import settled

_LAYER = re.compile(r"layers\.(\d+)\.")  # in names of linears


@dataclass(frozen=True, slots=True)
class Estimate:
    """The budget that `lmkit plan` prints. Sizes in bytes."""

    device_bytes: int
    process_bytes: int  # what an engine's process takes before it holds anything of a model
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int
    num_kv_tokens: int  # tokens the cache holds, all rows together
    max_length: int
    num_ranks: int = 1  # of which this is one
    max_adapters: int = 0  # for which `activation_bytes` have room
    weights_by_stage: tuple[int, ...] = ()  # of a rank of each, where ranks have different layers

    @property
    def total_bytes(self) -> int:
        return self.process_bytes + self.weight_bytes + self.activation_bytes + self.kv_bytes

    @property
    def concurrency(self) -> float:
        """Requests of max_length that fit at once."""
        return self.num_kv_tokens / self.max_length if self.max_length else 0.0


def estimate(
    info: ModelInfo, config: EngineConfig, device: DeviceInfo, *, dtype: str | None = None, block_size: int = 16,
    kv_dtype: str | None = None, weight_bytes: int | None = None, weights_by_stage: tuple[int, ...] = (),
) -> Estimate:  # fmt: skip
    """What would fit, from facts alone: nothing is loaded. Raises CapacityError as the engine would."""
    dtype = dtype or (device.dtypes[0] if info.dtype not in device.dtypes else info.dtype)
    specs = tuple(info.kv_specs(block_size, kv_dtype or dtype))
    weights = info.num_parameters * itemsize(dtype) if weight_bytes is None else weight_bytes
    max_tokens = step_tokens(config)
    activations = activation_bytes(info, dtype, max_tokens, config.sched.rows) + adapter_bytes(info, config, dtype)
    memory = device.free_memory or device.total_memory
    if device.device_type == "cpu":  # which ranks and engines share
        memory //= config.parallel.tp * config.parallel.pp * config.parallel.dp
    usable = max(0, memory - device.process_bytes)
    free = usable - weights - activations
    if free <= 0:
        raise CapacityError(
            f"weights ({format_size(weights)}) and activations ({format_size(activations)}) need "
            f"{format_size(weights + activations)}, the device has {format_size(usable)}",
            fix="use a smaller model or dtype, "
            + ("a smaller --max-loras or --max-lora-rank, " if config.lora.on else "")
            + "or another device",
        )
    facts = WorkerFacts(free, weights, activations, specs)
    kv = plan_kv(facts, config, max_length=info.max_length, causal=info.causal)
    length = fit_length(info, kv, max_tokens, config.model.max_length)
    per_token = sum(spec.bytes_per_token for spec in specs)
    tokens = min((n - 1) * spec.block_size for spec, n in zip(specs, kv.num_blocks, strict=True))
    full = [(n - 1) * spec.block_size for spec, n in zip(specs, kv.num_blocks, strict=True) if spec.window is None]
    return Estimate(
        memory, device.process_bytes, weights, activations, kv.nbytes, per_token, min(full, default=tokens), length,
        config.parallel.tp * config.parallel.pp, config.lora.max_adapters if config.lora.on else 0,
        weights_by_stage,
    )  # fmt: skip


def planned(config: EngineConfig, resolved: ResolvedPlan, checkpoint: Checkpoint, info: ModelInfo) -> Estimate:
    """The estimate of what `resolve(config)` gave: of one rank, where there are several; of the one with most weights,
    where they have different layers."""
    ranks, num_stages, num_layers = config.parallel.tp, config.parallel.pp, len(info.layers)
    stages = [_info_of_stage(info, stage(num_layers, i, num_stages)) for i in range(num_stages)]
    sizes = [weight_bytes(part, checkpoint, resolved, ranks) for part in stages]
    weights = max(sizes)
    most = stages[sizes.index(weights)]
    if (draft := resolved.draft) is not None:
        weights += weight_bytes(describe_model(draft.plan, draft.checkpoint), draft.checkpoint, draft.plan, ranks)
    return estimate(
        info_of_rank(most, ranks),
        settled(config, resolved),
        resolved.device,
        dtype=resolved.value("dtype"),
        block_size=resolved.value("block_size", 16),
        kv_dtype=resolved.value("kv_dtype"),
        weight_bytes=weights,
        weights_by_stage=tuple(sizes) if num_stages > 1 else (),
    )


def _info_of_stage(info: ModelInfo, layers: range) -> ModelInfo:
    """What weights of a rank that has these layers are counted by: the first has the embedding, the last the head."""
    last = layers.stop == len(info.layers)
    own = {spec: int(m[1]) in layers if (m := _LAYER.match(spec.name)) else last for spec in info.linears}
    tables = (layers.start > 0 and not (last and info.tie_embeddings)) + (not last and not info.tie_embeddings)
    elsewhere = [spec.total_out * spec.in_features for spec in info.linears if not own[spec] and not spec.is_head]
    return replace(
        info, layers=info.layers[layers.start : layers.stop], linears=tuple(spec for spec in own if own[spec]),
        num_parameters=info.num_parameters - sum(elsewhere) - tables * info.vocab_size * info.hidden_size,
        tie_embeddings=info.tie_embeddings and last,
    )  # fmt: skip
