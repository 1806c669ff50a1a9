"""The core's own registrations, through the same hooks as everybody's: without these nothing runs anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
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


@hookimpl(trylast=True)
def lmkit_chat_template(checkpoint: Checkpoint) -> str | None:
    """The template beside the weights: chat_template.jinja, or a field of one of the JSON files."""
    file = checkpoint.path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    for name in ("tokenizer_config.json", "chat_template.json"):
        value = _read(checkpoint.path / name).get("chat_template")
        if isinstance(value, list):  # several, by name
            dicts = [v for v in value if isinstance(v, dict) and v.keys() >= {"name", "template"}]
            named = {v["name"]: v["template"] for v in dicts}
            value = named.get("default") or named.get("tool_use")
        if isinstance(value, str):
            return value
    return None


def _read(path: Path) -> dict[str, object]:
    """A JSON object, {} when the file is absent or damaged: the tokenizer reports that, with its name."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
