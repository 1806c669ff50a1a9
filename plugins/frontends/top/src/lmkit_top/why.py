"""`lmkit why`: the life of one request on one screen, as the server that answered it remembers it."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import msgspec
import typer
from lmkit.api import EngineError
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lmkit_top.screen import number, seconds
from lmkit_top.server import Server


class Counts(msgspec.Struct):
    """Tokens."""

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int


class Seconds(msgspec.Struct):
    queue: float
    prefill: float
    decode: float
    stalled: float
    total: float


class Cache(msgspec.Struct):
    text: str  # why no more was found


class Other(msgspec.Struct):
    """A request that ran while this one waited, or the other way round; or only how many more there were."""

    id: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    more: int = 0


class Choice(msgspec.Struct):
    index: int
    adapter: str | None
    finish: str
    error: str | None
    usage: Counts
    seconds: Seconds
    prefill_steps: int
    preemptions: int
    decode_tokens_per_second: float | None
    cache: Cache
    waited_for: list[Other]
    kept_waiting: list[Other]


class Story(msgspec.Struct):
    """What /debug/requests/{id} says; fields that are not shown are not here."""

    id: str
    request_id: str
    route: str
    model: str
    running: bool
    choices: list[Choice]
    dropped_fields: list[str] = []


def why(
    request_id: Annotated[str, typer.Argument(help="the id in the answer, or its header x-request-id")],
    url: Annotated[str, typer.Option(help="of the server: http://HOST:PORT")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str, typer.Option(help="the key of the request, or an administrator's", envvar="LMKIT_API_KEY")
    ] = "",
) -> None:
    """Why a request took as long as it did: queue, prompt, prefix cache, drafts, and who waited for whom.

    The server remembers the requests that run, and about a thousand that ended. It remembers no texts.

    Example: lmkit why chatcmpl-1f0c --url http://127.0.0.1:8000
    """
    with Server(url, api_key) as server:
        Console(highlight=False).print(shown(ask(server, request_id)))


def ask(server: Server, request_id: str) -> Story:
    """Raises EngineError when the server knows no such request, or does not say."""
    path = f"/debug/requests/{quote(request_id, safe='')}"
    data = server.get(path, "give --api-key KEY: that of the request, or an administrator's")
    try:
        return msgspec.json.decode(data, type=Story)
    except msgspec.DecodeError as e:
        raise EngineError(f"{server.url}{path} is no story of a request: {e}", fix="ask a server of lmkit") from e


def shown(story: Story) -> RenderableType:
    """One screen for one choice."""
    title = Text(_plain(story.id), style="bold")
    if story.request_id != story.id:
        title.append(f"  x-request-id {_plain(story.request_id)}", style="dim")
    about = Text(f"{_plain(story.route)}  {_plain(story.model)}", style="cyan")
    if story.running:
        about.append("  it is running", style="green")
    if story.dropped_fields:
        about.append(f"\ndropped fields: {', '.join(map(_plain, story.dropped_fields))}", style="yellow")
    return Panel(Group(title, about, *(part for choice in story.choices for part in _choice(choice, story))))


def _choice(choice: Choice, story: Story) -> list[RenderableType]:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", min_width=12)
    table.add_column(overflow="fold")
    for label, text in lines(choice):
        table.add_row(label, Text(_plain(text)))
    heading = [Text(f"choice {choice.index}", style="bold")] if len(story.choices) > 1 else []
    return [Text(), *heading, table]


def lines(choice: Choice) -> list[tuple[str, str]]:
    """What is said of a choice: a label, and one line."""
    counts, took = choice.usage, choice.seconds
    steps = f"in {choice.prefill_steps} steps" if choice.prefill_steps != 1 else "in one step"
    found = f"{counts.computed_tokens} of {counts.prompt_tokens} tokens computed {steps}"
    rate = choice.decode_tokens_per_second
    said = f"{seconds(took.decode)}: {counts.completion_tokens} tokens"
    said += f", {number(rate, ' a second')}" if rate is not None else ""
    said += f", {counts.reasoning_tokens} of them reasoning" if counts.reasoning_tokens else ""
    rows = [
        ("queue", seconds(took.queue)), ("waited for", _named(choice.waited_for)),
        ("prompt", f"{seconds(took.prefill)}: {found}"),
        ("prefix cache", f"{counts.cached_tokens} tokens found: {choice.cache.text}"),
        ("decode", said), ("drafts", _drafts(counts)),
        ("preempted", f"{choice.preemptions} times, {seconds(took.stalled)} in the queue again"
         if choice.preemptions else ""),
        ("kept waiting", _named(choice.kept_waiting)), ("adapter", choice.adapter or ""),
        ("ended", f"{choice.finish}{f' ({choice.error})' if choice.error else ''}, after {seconds(took.total)}"),
    ]  # fmt: skip
    return [(label, text) for label, text in rows if text]


def _drafts(counts: Counts) -> str:
    if not counts.draft_tokens:
        return ""
    return f"{counts.accepted_draft_tokens} of {counts.draft_tokens} guessed tokens were right"


def _named(others: list[Other]) -> str:
    return ", ".join(
        f"{o.more} more" if o.more else f"{o.id} ({o.prompt_tokens} + {o.completion_tokens} tokens)" for o in others
    )


def _plain(text: str) -> str:
    """Ids come from clients: nothing in them may steer a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:1000])
