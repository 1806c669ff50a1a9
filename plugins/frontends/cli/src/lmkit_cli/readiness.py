"""Finds what keeps `lmkit serve` from starting though everything has been chosen. Loads no weights and no torch."""

from __future__ import annotations

from dataclasses import replace

from lmkit.api import CannotSplit, Checkpoint, LinearSpec, LmkitError, ModelInfo, ResolvedPlan
from lmkit.config import EngineConfig
from lmkit.plugins import load_target
from lmkit.text.side import TextSide

from lmkit_cli.estimate import Estimate, planned


def unready(
    config: EngineConfig, plan: ResolvedPlan, checkpoint: Checkpoint, info: ModelInfo
) -> tuple[Estimate | None, dict[str, LmkitError]]:
    """The memory budget, and errors that `serve` would end with, by the step that they belong to.

    No budget where memory is refused, or where it is not said how much a described device has.
    """
    errors: dict[str, LmkitError] = {}
    budget = None
    try:
        TextSide.open(checkpoint, plan, config)
    except LmkitError as e:
        errors["tokenizer"] = e
    try:
        _split(config.parallel.tp, plan, checkpoint, info)
    except LmkitError as e:
        errors["quantization"] = e
    if "quantization" not in errors and (plan.device.free_memory or plan.device.total_memory):
        try:
            budget = planned(config, plan, checkpoint, info)
        except LmkitError as e:
            errors["platform"] = e
    return budget, errors


def _split(num_ranks: int, plan: ResolvedPlan, checkpoint: Checkpoint, info: ModelInfo) -> None:
    """Raises CannotSplit where heads, or the stored form of a layer, do not divide over ranks."""
    for need, _ in info.kv_groups():
        num_q, num_kv = need.num_q_heads, need.num_kv_heads
        more, fewer = sorted((num_ranks, num_kv), reverse=True)
        if num_q % num_ranks or (more % fewer and not need.mla):
            heads = f"{num_q} heads" if need.mla else f"{num_q} query and {num_kv} key-value heads"
            raise CannotSplit(f"{heads} cannot be split over {num_ranks} ranks")
    choice = plan.choice("quantization")
    if num_ranks == 1 or choice is None:
        return
    scheme = load_target(choice).parse(checkpoint.config.get("quantization_config") or choice.options)
    for spec in info.linears:
        fmt, local = scheme.for_layer(spec), _local(spec, num_ranks)
        if fmt is not None and local is not None and not spec.is_head:
            fmt.params(local, plan.value("dtype") or info.dtype)


def _local(spec: LinearSpec, num_ranks: int) -> LinearSpec | None:
    """The part of a rank; None where each has the whole, or has copies of some parts."""
    if spec.shard == "row":
        if spec.in_features % num_ranks:
            raise CannotSplit(f"{spec.name}: sizes ({spec.in_features},) cannot be split over {num_ranks} ranks")
        return replace(spec, in_features=spec.in_features // num_ranks)
    if spec.shard == "column" and not any(n % num_ranks for n in spec.out_features):
        return replace(spec, out_features=tuple(n // num_ranks for n in spec.out_features))
    return None
