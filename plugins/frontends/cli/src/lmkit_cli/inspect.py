"""`lmkit inspect`: what a checkpoint is and what would run it, from its configuration and headers. Loads nothing."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer
from lmkit.api import ConfigError, ModelInfo
from lmkit.config import format_size
from lmkit.plugins.resolve import Resolver
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmkit_cli.options import plugin_host, with_config
from lmkit_cli.readiness import unready
from lmkit_cli.settings import Sourced

SHOWN = ("model", "platform", "attention", "quantization", "op", "loader", "tool_parser", "reasoning_parser")


@with_config
def command(
    settings: Sourced,
    context: Annotated[
        int | None, typer.Option(help="tokens of one request, for its memory; default: all that the model reads")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the same as data; sizes in bytes")] = False,
) -> None:
    """Show what a checkpoint is (format, architecture, size, context), the memory it takes, and what would run it."""
    resolver = Resolver(settings.config, plugin_host(settings), tolerant=True)
    resolver.run()
    if "checkpoint" in resolver.errors:
        raise resolver.errors["checkpoint"]
    found = inspect(resolver, context)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        _show(found, Console(highlight=False))


def inspect(resolver: Resolver, context: int | None = None) -> dict[str, Any]:
    """What is known of the checkpoint of `resolver`, which has run; under "problems" what prevents running it."""
    checkpoint = resolver.known.checkpoint
    if not resolver.errors:
        resolver.errors |= unready(resolver.config, resolver.plan(), checkpoint, resolver.known.info)[1]
    quantization = checkpoint.config.get("quantization_config")
    found: dict[str, Any] = {
        "model": checkpoint.ref,
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "architecture": checkpoint.architecture,
        "files": len(checkpoint.files),
        "bytes": checkpoint.nbytes,
        "quantization": quantization.get("quant_method") if isinstance(quantization, dict) else None,
        "defaults": dict(checkpoint.generation_config),
    }
    if (info := getattr(resolver.known, "info", None)) is not None:
        found |= _model(info)
        if context is not None and not 1 <= context <= info.max_length:
            raise ConfigError(f"--context {context}: the model reads from 1 to {info.max_length} tokens")
        if "attention" not in resolver.errors and resolver.known.device is not None:
            found["memory"] = _memory(resolver, info, context or info.max_length)
    found["ends"] = [{"id": e.id, "token": e.token, "from": list(e.sources)} for e in resolver.ends]
    choices = resolver.plan().choices if resolver.known.device is not None else ()
    found["run_by"] = [
        {"kind": c.kind, "component": c.component, "name": c.name, "why": c.why, "refused": [r.name for r in c.refused]}
        for c in choices
        if c.kind in SHOWN
    ]
    found["problems"] = [
        {"step": step, "message": e.message, "fix": e.fix} for step, e in resolver.errors.items()
        if step not in resolver.roots
    ]  # fmt: skip
    return found


def _model(info: ModelInfo) -> dict[str, Any]:
    pooler = info.pooler
    return {
        "tasks": list(pooler.tasks) if pooler is not None else ["generate"],
        "parameters": info.num_parameters,
        "dtype": info.dtype,
        "layers": len(info.layers),
        "vocabulary": info.vocab_size,
        "context": info.max_length,
        "attention": [
            {"layers": len(layers), "q_heads": need.num_q_heads, "kv_heads": need.num_kv_heads,
             "head_dim": need.head_dim, "features": sorted(need.features), "window": need.window}
            for need, layers in info.kv_groups()
        ],
        "recurrent": len(info.recurrent),
        **({"labels": list(pooler.labels), "vector": pooler.size} if pooler is not None else {}),
    }  # fmt: skip


def _memory(resolver: Resolver, info: ModelInfo, context: int) -> dict[str, Any]:
    """The bytes of one request of `context` tokens."""
    from lmkit import memory
    from lmkit.plugins.proposals import settled

    plan = resolver.plan()
    config = settled(resolver.config, plan)
    dtype, tokens = plan.value("dtype"), memory.step_tokens(config)
    specs = info.kv_specs(plan.value("block_size", 16), plan.value("kv_dtype", dtype))
    weights = memory.weight_bytes(info, resolver.known.checkpoint, plan)
    activations = memory.activation_bytes(info, dtype, tokens, config.sched.rows)
    activations += memory.adapter_bytes(info, config, dtype)
    kv, process = memory.bytes_for(specs, context, tokens), plan.device.process_bytes
    return {
        "context": context, "dtype": dtype, "weights": weights, "activations": activations, "kv": kv,
        "process": process,
        "kv_per_token": sum(spec.bytes_per_token for spec in specs),
        "total": process + weights + activations + kv,
    }  # fmt: skip


def _show(found: dict[str, Any], console: Console) -> None:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", min_width=16)
    table.add_column(overflow="fold")
    table.add_row("model", f"{found['model']} ({found['path']})")
    table.add_row("format", f"{found['format']}, {found['files']} files, {format_size(found['bytes'])}")
    table.add_row("architecture", found["architecture"] or "none named")
    if "parameters" in found:
        table.add_row("parameters", f"{found['parameters']:,} in {found['layers']} layers, {found['dtype']}")
        table.add_row("tasks", ", ".join(found["tasks"]))
        table.add_row("context", f"{found['context']:,} tokens, vocabulary {found['vocabulary']:,}")
        for group in found["attention"]:
            window = f", window {group['window']}" if group["window"] else ""
            heads = f"{group['q_heads']} query and {group['kv_heads']} KV heads of {group['head_dim']}"
            table.add_row("attention", f"{group['layers']} layers: {heads}{window}")
        if found["recurrent"]:
            table.add_row("recurrent state", f"{found['recurrent']} layers; no drafts, prefix cache where asked for")
    if found["ends"]:
        ends = (f"{e['id']} {e['token']} ({', '.join(e['from'])})" for e in found["ends"])
        table.add_row("end tokens", Text("; ".join(ends)))  # not markup: they have brackets
    table.add_row("quantization", found["quantization"] or "none")
    if (parts := found.get("memory")) is not None:
        sizes = {name: format_size(parts[name]) for name in ("total", "weights", "activations", "kv", "process")}
        table.add_row(
            "memory",
            f"{sizes['total']} for {parts['context']:,} tokens: weights {sizes['weights']}, "
            f"step {sizes['activations']}, KV {sizes['kv']}, process {sizes['process']}",
        )
    for choice in found["run_by"]:
        label = choice["kind"].replace("_", " ") + (f" {choice['component']}" if choice["component"] else "")
        refused = f"; refused: {', '.join(choice['refused'])}" if choice["refused"] else ""
        table.add_row(label, f"{choice['name']} ({choice['why']}{refused})")
    for problem in found["problems"]:
        fix = f" -> {problem['fix']}" if problem["fix"] else ""
        table.add_row(f"problem: {problem['step']}", f"{problem['message']}{fix}")
    console.print(table)


command.examples = """[bold]Examples[/]

lmkit inspect Qwen/Qwen2.5-0.5B-Instruct

lmkit inspect ./my-model --context 8192 --json

lmkit inspect ./my-model --hf-overrides '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}'
"""
