"""The core's own registrations, through the same hooks as everybody's: without these nothing runs anywhere."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING

from lmkit.api import ExecutorSpec, LoaderSpec, OpSpec, Tier, hookimpl

if TYPE_CHECKING:
    from lmkit.api import Checkpoint, CheckpointOptions


@hookimpl
def lmkit_executors() -> Iterable[ExecutorSpec]:
    yield ExecutorSpec(
        name="uniproc",
        summary="One worker in the engine process",
        target="lmkit.execution.uniproc:UniprocExecutor",
        tier=Tier.PORTABLE,
        stability="stable",
        max_ranks=1,
    )


@hookimpl
def lmkit_loaders() -> Iterable[LoaderSpec]:
    yield LoaderSpec(
        name="safetensors",
        summary="Memory-mapped safetensors files, single or sharded",
        target="lmkit.loading.safetensors:SafetensorsLoader",
        tier=Tier.PORTABLE,
        stability="stable",
        formats=("safetensors",),
    )


@hookimpl
def lmkit_ops() -> Iterable[OpSpec]:
    yield OpSpec(
        name="linear_reference",
        summary="Any weight format, dequantized; the oracle of linear kernels",
        target="lmkit.layers.linear:ReferenceLinear",
        tier=Tier.REFERENCE,
        stability="stable",
        op="linear",
    )
    yield OpSpec(
        name="rowwise_torch",
        summary="Norms, activations and rotary positions in plain torch; the oracle of row-wise operators",
        target="lmkit.layers.rowwise:TorchRowOps",
        tier=Tier.REFERENCE,
        stability="stable",
        op="rowwise",
    )


@hookimpl(trylast=True)
def lmkit_resolve_checkpoint(ref: str, options: CheckpointOptions) -> Checkpoint | None:
    """Local directories and hub ids. The import waits until a checkpoint is really looked for."""
    return import_module("lmkit.loading.checkpoint").open_checkpoint(ref, options)
