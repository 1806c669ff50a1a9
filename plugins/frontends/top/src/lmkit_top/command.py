"""`lmkit top`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import Annotated

import typer
from lmkit.api import EngineError
from rich.console import Console
from rich.live import Live

from lmkit_top.figures import Snapshot
from lmkit_top.screen import WIDTH, screen
from lmkit_top.server import Server


def top(
    url: Annotated[str, typer.Argument(help="of the server: http://HOST:PORT")] = "http://127.0.0.1:8000",
    interval: Annotated[float, typer.Option(help="seconds between two looks", min=0.1, max=3600)] = 1.0,
    api_key: Annotated[str, typer.Option(help="where /metrics needs one", envvar="LMKIT_API_KEY")] = "",
    looks: Annotated[int, typer.Option(help="end after so many; 0: go on until Ctrl-C", min=0)] = 0,
) -> None:
    """Watch a running server: requests, KV cache, tokens a second, latencies. Ctrl-C ends it.

    Reads /metrics, of lmkit or of vLLM; the server does nothing for it between two looks.

    Example: lmkit top http://127.0.0.1:8000 --interval 2
    """
    with Server(url, api_key) as server:
        show(server, interval, looks, Console(highlight=False))


def show(server: Server, interval: float, looks: int, console: Console) -> None:
    """On a terminal a screen that changes; in a pipe one after the other."""
    seen = deque([server.look()], WIDTH + 1)  # what is wrong at the beginning ends it; later it may come back
    if not console.is_terminal:
        for error in watch(server, seen, interval, looks or 2):  # two: rates are of what happened between them
            console.print(screen(server.url, seen, error))
        return
    with Live(screen(server.url, seen), console=console, screen=not looks, auto_refresh=False) as live:
        try:
            for error in watch(server, seen, interval, looks):
                live.update(screen(server.url, seen, error), refresh=True)
        except KeyboardInterrupt:
            return


def watch(server: Server, seen: deque[Snapshot], interval: float, looks: int) -> Iterator[str]:
    """Adds a look to `seen` every `interval` seconds, until there were `looks` with the first; 0: for ever. Yields why
    there was none, or ""."""
    for _ in range(looks - 1) if looks else count():
        time.sleep(interval)
        try:
            seen.append(server.look())
            yield ""
        except EngineError as e:
            yield e.message
