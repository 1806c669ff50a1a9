"""`lmkit quantize`."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from lmkit.api import ConfigError
from lmkit.config import format_size
from lmkit.plugins.resolve import Resolver
from lmkit_cli.options import plugin_host, with_config
from lmkit_cli.settings import Sourced
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lmkit_quantize.writing import Report

SHOWN = 8  # layers with the largest errors


@with_config
def quantize(
    settings: Sourced,
    output: Annotated[Path, typer.Option("--output", "-o", help="directory for the result")],
    scheme: Annotated[
        Literal["int4", "int8", "w8a8", "fp8"],
        typer.Option(help="int4, int8: weights only; w8a8, fp8: where it runs, activations too are rounded per token"),
    ] = "int4",
    group_size: Annotated[
        Literal["32", "64", "128"] | None, typer.Option(help="columns that share a scale, for int4 and int8; int4: 128")
    ] = None,
    zero_points: Annotated[
        bool, typer.Option("--zero-points", help="int4, int8: the values of a group need not lie around zero")
    ] = False,
    ignore: Annotated[list[str] | None, typer.Option(help="a linear that stays as it is; may be repeated")] = None,
    text: Annotated[Path | None, typer.Option(help="a text file: perplexity on it before and after")] = None,
) -> None:
    """Round a checkpoint's weights to 4 or 8 bits, to the nearest; lmkit, vLLM and transformers load the result.

    Written file by file, never twice in memory; a run that was interrupted goes on where it stopped. The output head,
    embeddings, norms and routers stay as they are. --quantization int4 does the same while a checkpoint is loaded.

    Example: lmkit quantize ./my-model -o ./my-model-int4 --scheme int4 --text sample.txt
    """
    from lmkit_quantize.quality import perplexity
    from lmkit_quantize.rounding import SCHEMES
    from lmkit_quantize.writing import quantize as write

    chosen = SCHEMES[scheme]
    if chosen.format != "pack-quantized" and (group_size or zero_points):
        raise ConfigError(f"--scheme {scheme} has one scale per row and no zero points", fix="--scheme int4 or int8")
    chosen = replace(chosen, group=int(group_size or chosen.group), symmetric=not zero_points)
    if text is not None and not text.is_file():
        raise ConfigError(f"--text {text}: there is no such file")
    resolver = Resolver(settings.config, plugin_host(settings), tolerant=True)
    resolver.run()
    if "checkpoint" in resolver.errors:
        raise resolver.errors["checkpoint"]
    checkpoint = resolver.known.checkpoint
    if checkpoint.format != "safetensors":
        raise ConfigError(f"{checkpoint.ref} is stored as {checkpoint.format}", fix="give a checkpoint of safetensors")
    with _bar(checkpoint.nbytes) as advance:
        report = write(checkpoint, output, chosen, ignore or [], advance)
    _show(report, output, Console(highlight=False))
    if text is not None:
        before, after = (perplexity(str(path), text.read_text(encoding="utf-8")) for path in (checkpoint.path, output))
        print(f"perplexity on {text.name}: {before:.2f} before, {after:.2f} after ({after / before - 1:+.1%})")


@contextmanager
def _bar(nbytes: int) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("rounding", total=nbytes)
        yield lambda size: bar.advance(task, size)


def _show(report: Report, output: Path, console: Console) -> None:
    table = Table("linear", "relative error", title=f"the largest of {len(report.layers)} errors", title_justify="left")
    for layer in sorted(report.layers, key=lambda layer: -layer.error)[:SHOWN]:
        table.add_row(layer.name, f"{layer.error:.2%}")
    console.print(table)
    mean = sum(layer.error for layer in report.layers) / max(len(report.layers), 1)
    before, after = format_size(report.source_bytes), format_size(report.nbytes)
    console.print(f"mean error {mean:.2%}; {before} before, {after} after; {len(report.ignored)} linears as they were")
    console.print(f"lmkit serve {output}")
