"""What `serve`, `chat` and `plan` print about an engine: what was chosen and why, the memory budget, start-up times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lmkit.api import Checkpoint, ModelInfo, ResolvedPlan
from lmkit.config import format_size
from lmkit.engine.messages import EngineFacts
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmkit_cli.estimate import Estimate

SHOWN = ("platform", "attention", "quantization", "loader", "scheduler", "tool_parser", "reasoning_parser")
MAX_REFUSED = 3  # names in a line; the rest is counted


def choices(resolved: ResolvedPlan, checkpoint: Checkpoint, info: ModelInfo) -> Table:
    """Component, name, reason."""
    table = _table()
    size = f"{info.num_parameters / 1e6:,.1f}M parameters, {resolved.value('dtype', info.dtype)}"
    experts = any(linear.experts for linear in info.linears)
    table.add_row("model", checkpoint.ref, f"{info.architecture}, {size}")
    for choice in resolved.choices:
        if choice.kind in SHOWN:
            label = choice.kind.replace("_", " ")
            why = choice.why
            if choice.refused:
                names = [refusal.name for refusal in choice.refused]
                rest = f" and {len(names) - MAX_REFUSED} more: lmkit explain" if len(names) > MAX_REFUSED else ""
                why += f"; refused: {', '.join(names[:MAX_REFUSED])}{rest}"
            table.add_row(label, choice.name, why)
        elif choice.kind == "op" and not choice.why.startswith("fallback"):
            op, _, fmt = choice.component.partition(":")
            table.add_row(f"{op} {fmt}".strip(), choice.name, f"kernel, {choice.why}")
            if op == "linear" and experts and resolved.choice("op", f"moe:{fmt}") is None:
                table.add_row(f"moe {fmt}", choice.name, "kernel, one expert at a time")
    if info.recurrent:
        table.add_row("recurrent", "torch", f"{len(info.recurrent)} layers, by the model's own operators")
    name, _, more = (resolved.device.name or resolved.device.platform).partition(", ")
    table.add_row("device", name, more)
    return table


def budget(found: Estimate | EngineFacts) -> Table:
    """Memory, of one rank where there are several, and what it buys."""
    table = _table()
    table.add_row(
        "weights", format_size(found.weight_bytes), f"of each of {found.num_ranks} ranks" if found.num_ranks > 1 else ""
    )
    stages = getattr(found, "weights_by_stage", ())
    if stages:
        table.add_row("", ", ".join(map(format_size, stages)), "by rank, one after another")
    room = ", and adapters that may come" if found.max_adapters else ""
    table.add_row("activations", format_size(found.activation_bytes), f"one step at the limits{room}")
    table.add_row("KV cache", format_size(found.kv_bytes), f"{found.num_kv_tokens:,} tokens")
    if found.process_bytes:
        size = format_size(found.process_bytes)
        table.add_row("process", size, "what the process takes beside the model")
    table.add_row("total", format_size(found.total_bytes), "")
    concurrency = found.num_kv_tokens / found.max_length if found.max_length else 0.0
    table.add_row("context", f"{found.max_length:,} tokens", f"{concurrency:.1f} requests of that length at once")
    return table


def phases(seconds: Sequence[tuple[str, float]]) -> Text:
    """Start-up in one line; the parts sum to the total."""
    total = sum(value for _, value in seconds)
    parts = ", ".join(f"{name} {value:.2f}" for name, value in seconds if value >= 0.005)
    return Text(f"ready in {total:.2f} s ({parts})", style="dim")


def heading(console: Console, title: str) -> None:
    console.print(Text(title, style="bold"))


def warnings(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(Text(f"warning: {line}", style="yellow"))


def _table() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", min_width=16)
    table.add_column()
    table.add_column(style="dim", overflow="fold")
    return table
