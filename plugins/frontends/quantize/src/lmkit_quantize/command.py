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
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmkit_quantize.calibration import Calibration
    from lmkit_quantize.writing import Advance, Report

SHOWN = 8  # layers with the largest errors


@with_config
def quantize(
    settings: Sourced,
    output: Annotated[Path, typer.Option("--output", "-o", help="directory for the result")],
    scheme: Annotated[
        Literal["int4", "int8", "w8a8", "fp8"],
        typer.Option(help="int4, int8: weights only; w8a8, fp8: where it runs, activations too are rounded per token"),
    ] = "int4",
    method: Annotated[
        Literal["rtn", "gptq", "awq"],
        typer.Option(help="rtn: nearest; gptq, awq: by what layers see (pip install 'lmkit-quantize\\[calibration]')"),
    ] = "rtn",
    calibration: Annotated[
        Path | None,
        typer.Option(help="gptq, awq: a text like those that the model will see; without one, it writes one itself"),
    ] = None,
    calibration_tokens: Annotated[
        int | None, typer.Option(min=1, help="gptq: 65536, awq: 16384; time grows with them")
    ] = None,
    group_size: Annotated[
        Literal["32", "64", "128"] | None, typer.Option(help="columns that share a scale, for int4 and int8; int4: 128")
    ] = None,
    zero_points: Annotated[
        bool, typer.Option("--zero-points", help="int4, int8: the values of a group need not lie around zero")
    ] = False,
    ignore: Annotated[list[str] | None, typer.Option(help="a linear that stays as it is; may be repeated")] = None,
    text: Annotated[Path | None, typer.Option(help="a text file: perplexity on it before and after")] = None,
) -> None:
    """Round a checkpoint's weights to 4 or 8 bits; lmkit, vLLM and transformers load the result.

    rtn is written file by file, never twice in memory. gptq and awq take the whole model in float32, and hours for
    billions of parameters on a processor. What was interrupted goes on after the last file, with gptq and awq after
    the last decoder layer. The output head, embeddings, norms and routers stay as they are. --quantization int4 does
    the same as rtn while a checkpoint is loaded.

    Example: lmkit quantize ./my-model -o ./my-model-int4 --scheme int4 --text sample.txt

    Example: lmkit quantize ./my-model -o ./my-model-gptq --method gptq --calibration train.txt
    """
    from lmkit_quantize.quality import perplexity
    from lmkit_quantize.rounding import SCHEMES
    from lmkit_quantize.writing import Perplexity, save
    from lmkit_quantize.writing import quantize as write

    chosen = SCHEMES[scheme]
    if chosen.format != "pack-quantized" and (group_size or zero_points):
        raise ConfigError(f"--scheme {scheme} has one scale per row and no zero points", fix="--scheme int4 or int8")
    chosen = replace(chosen, group=int(group_size or chosen.group), symmetric=not zero_points)
    for name, path in (("--text", text), ("--calibration", calibration)):
        if path is not None and not path.is_file():
            raise ConfigError(f"{name} {path}: there is no such file")
    how = _calibration(method, calibration, calibration_tokens)
    resolver = Resolver(settings.config, plugin_host(settings), tolerant=True)
    resolver.run()
    if "checkpoint" in resolver.errors:
        raise resolver.errors["checkpoint"]
    checkpoint = resolver.known.checkpoint
    if checkpoint.format != "safetensors":
        raise ConfigError(f"{checkpoint.ref} is stored as {checkpoint.format}", fix="give a checkpoint of safetensors")
    with _bar() as advance:
        report = write(checkpoint, output, chosen, ignore or [], advance, how)
    if text is not None:
        before, after = (perplexity(str(path), text.read_text(encoding="utf-8")) for path in (checkpoint.path, output))
        report.perplexity = Perplexity(text.name, before, after)
        save(report, output)
    _show(report, output, Console(highlight=False))


def _calibration(method: str, path: Path | None, tokens: int | None) -> Calibration | None:
    from lmkit_quantize.calibration import Calibration

    if method == "rtn":
        if path is not None or tokens is not None:
            raise ConfigError("--method rtn looks at no text", fix="--method gptq or awq")
        return None
    text = path.read_text(encoding="utf-8") if path is not None else ""
    return Calibration("gptq" if method == "gptq" else "awq", text, tokens or 0)


@contextmanager
def _bar() -> Iterator[Advance]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    tasks: dict[str, TaskID] = {}

    def advance(what: str, total: int, more: int) -> None:
        if not tasks:  # before, the model may be writing its text, under a bar of its own
            bar.start()
        if what not in tasks:
            tasks[what] = bar.add_task(what, total=total)
        bar.advance(tasks[what], more)

    try:
        yield advance
    finally:
        bar.stop()


def _show(report: Report, output: Path, console: Console) -> None:
    seen = [layer for layer in report.layers if layer.output_error is not None]
    table = Table(title=f"relative errors, the largest of {len(report.layers)}", title_justify="left")
    table.add_column("linear", overflow="fold")
    for title in ("weights", *(("outputs", "outputs, rtn") if seen else ())):
        table.add_column(title, justify="right", no_wrap=True)
    for layer in sorted(report.layers, key=lambda layer: -(layer.output_error or layer.error))[:SHOWN]:
        outputs = (layer.output_error, layer.rtn_output_error) if seen else ()
        table.add_row(layer.name, f"{layer.error:.2%}", *("-" if e is None else f"{e:.2%}" for e in outputs))
    console.print(table)
    if seen:
        now, rtn = (sum(e) / len(seen) for e in zip(*((s.output_error, s.rtn_output_error) for s in seen), strict=True))
        console.print(f"mean error of outputs {now:.2%}, {now / rtn - 1:+.0%} beside rtn ({rtn:.2%})")
    mean = sum(layer.error for layer in report.layers) / max(len(report.layers), 1)
    before, after = format_size(report.source_bytes), format_size(report.nbytes)
    console.print(
        f"mean error of weights {mean:.2%}; {before} before, {after} after; {len(report.ignored)} linears as they were"
    )
    if (found := report.perplexity) is not None:
        change = f"{found.after / found.before - 1:+.1%}"
        console.print(f"perplexity on {found.text}: {found.before:.2f} before, {found.after:.2f} after ({change})")
    console.print(f"lmkit serve {output}", soft_wrap=True)  # to be copied
