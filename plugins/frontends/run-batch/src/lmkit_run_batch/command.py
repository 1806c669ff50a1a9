"""`lmkit run-batch`: the requests of a batch file, answered by the dialects as a server would, without one."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from lmkit.api import ConfigError
from lmkit_cli.options import plugin_host, with_config
from lmkit_cli.settings import Sourced
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmkit.plugins.host import PluginHost
    from lmkit_http.dialect import Answer

    from lmkit_run_batch.results import Results

SHOWN = 5  # faults of an input


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Body(msgspec.Struct):
    usage: _Usage | None = None


@with_config(model_argument=False)
def run_batch(
    settings: Sourced,
    input: Annotated[Path, typer.Option("--input", "-i", help="a request on each line, in the OpenAI batch format")],
    output: Annotated[Path, typer.Option("--output", "-o", help="gets a result line for each request")],
    resume: Annotated[bool, typer.Option("--resume", help="go on with an output that an earlier run began")] = False,
    ray: Annotated[str, typer.Option(help="Ray cluster: local, auto or HOST:PORT; the output is a folder")] = "",
    ray_engines: Annotated[int, typer.Option(help="engines on it", min=1)] = 1,
    ray_rows: Annotated[int, typer.Option(help="requests of each file there", min=1)] = 1000,
) -> None:
    """Answer a batch file of the OpenAI API without a server.

    Each line has custom_id, method POST, url and body; requests to different urls may stand in one file. Results come
    as they are ready, in one file, failed requests too. A run that was interrupted, or killed, goes on with --resume:
    each request has one line in the end.

    Example: lmkit run-batch -i requests.jsonl -o results.jsonl --model ./my-model
    """
    from lmkit_run_batch.results import Results

    total, ids = _checked(input)
    if ray:
        _over_ray(settings, ray, input, output, resume, ray_engines, ray_rows)
        return
    if output.exists() and output.stat().st_size and not resume:
        raise ConfigError(f"{output} has something in it", fix="say --resume to go on with it, or choose another file")
    try:
        results = Results(output, output)
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}", fix="choose another file") from error
    try:
        if strange := next((id for id in results.ids if id not in ids), None):
            raise ConfigError(f"{output} has a result of {strange!r}, which {input} has not", fix="choose another file")
        if len(results.ids) < total:
            asyncio.run(_answer(settings, plugin_host(settings), input, results, total))
    finally:
        results.close()
        said = f"{results.num_completed} answered, {results.num_failed} failed, of {total}"
        left = "" if len(results.ids) == total else "; go on with --resume"
        Console(stderr=True, highlight=False).print(f"{said}: {output}{left}", soft_wrap=True)


def _over_ray(settings: Sourced, ray: str, path: Path, folder: Path, resume: bool, engines: int, rows: int) -> None:
    from rich.progress import Progress

    from lmkit_run_batch.spread import prepare, spread

    blocks = prepare(path, folder, rows, resume)
    completed = failed = 0
    console = Console(stderr=True, highlight=False)
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("blocks", total=len(blocks))
        for some, others in spread(settings.config, ray, path, folder, blocks, engines) if blocks else ():
            completed, failed = completed + some, failed + others
            bar.advance(task)
    console.print(f"{completed} answered, {failed} failed, in {len(blocks)} files: {folder}", soft_wrap=True)


def _checked(path: Path) -> tuple[int, set[str]]:
    """How many requests there are, and their ids. Raises ConfigError."""
    from lmkit_run_batch.lines import check_lines, requests

    try:
        total, faults = check_lines(path, most=sys.maxsize)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", fix="give a file of requests") from error
    if faults:
        shown = "; ".join(
            f"line {fault.line}: {fault.message}" if fault.line else fault.message for fault in faults[:SHOWN]
        )
        raise ConfigError(f"{path}: {shown}", fix="correct the file; nothing was run")
    return total, {line.custom_id for line in requests(path)}


async def _answer(settings: Sourced, host: PluginHost, path: Path, results: Results, total: int) -> None:
    """All requests that have no result yet, as a server without clients would."""
    from lmkit_cli.progress import StartBar
    from lmkit_http.app import build_app
    from lmkit_http.background import Background
    from lmkit_http.dialects import load_dialects
    from lmkit_http.settings import ServerSettings
    from lmkit_python.front.run import at_once
    from lmkit_python.llm import AsyncLLM
    from lmkit_python.progress import prompt_bar

    from lmkit_run_batch.lines import requests
    from lmkit_run_batch.play import play, while_alive

    dialects = load_dialects(host, settings.config.plugins)
    with StartBar() as bar:
        llm = await AsyncLLM.start(settings.config, progress=bar, host=host)
    async with llm:
        app = build_app(llm, ServerSettings(served_names=settings.config.model.names), dialects)
        ask = Background(app.state.backend, dialects, at_once(llm.client)).answer
        with prompt_bar(total - len(results.ids)) as advance:
            await while_alive(llm.client, play(requests(path), results, ask, wrote=_counter(advance)))


def _counter(advance: Callable[[int, bool], Any]) -> Callable[[Answer], None]:
    """Moves a bar on by each answer, which says itself how many tokens it has."""

    def wrote(answer: Answer) -> None:
        body = b"" if isinstance(answer.body, Path) else answer.body
        try:
            usage = msgspec.json.decode(body, type=_Body).usage
        except msgspec.DecodeError:
            usage = None
        advance(usage.completion_tokens if usage is not None else 0, True)

    return wrote
