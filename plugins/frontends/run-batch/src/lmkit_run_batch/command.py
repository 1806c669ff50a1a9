"""`lmkit run-batch`: the requests of a batch file, answered by the dialects as a server would, without one."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from lmkit.api import ConfigError, EngineDead
from lmkit_cli.options import plugin_host, with_config
from lmkit_cli.settings import Sourced
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from lmkit.engine.client import EngineClient
    from lmkit.plugins.host import PluginHost
    from lmkit_http.dialect import Answer

    from lmkit_run_batch.results import Results

SHOWN = 5  # faults of an input
_LOOK = 0.25  # seconds between looks at the engine


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
) -> None:
    """Answer a batch file of the OpenAI API without a server.

    Each line has custom_id, method POST, url and body; requests to different urls may stand in one file. Results come
    as they are ready, in one file, failed requests too. A run that was interrupted, or killed, goes on with --resume:
    each request has one line in the end.

    Example: lmkit run-batch -i requests.jsonl -o results.jsonl --model ./my-model
    """
    from lmkit_run_batch.results import Results

    total, ids = _checked(input)
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
    from lmkit_run_batch.play import play

    dialects = load_dialects(host, settings.config.plugins)
    with StartBar() as bar:
        llm = await AsyncLLM.start(settings.config, progress=bar, host=host)
    async with llm:
        app = build_app(llm, ServerSettings(served_names=settings.config.model.names), dialects)
        ask = Background(app.state.backend, dialects, at_once(llm.client)).answer
        with prompt_bar(total - len(results.ids)) as advance:
            await _while_alive(llm.client, play(requests(path), results, ask, wrote=_counter(advance)))


async def _while_alive(client: EngineClient, work: Coroutine[Any, Any, None]) -> None:
    """Raises EngineDead when there is no engine any more, which requests would wait for."""
    playing = asyncio.create_task(work)
    try:
        while not (client.ended or playing.done()):
            await asyncio.wait((playing,), timeout=_LOOK)
    finally:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
    if playing.cancelled():
        failure = client.failure
        raise EngineDead(failure.message if failure is not None else "the engine is gone", fix="go on with --resume")
    playing.result()


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
