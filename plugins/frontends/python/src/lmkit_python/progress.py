"""A bar for offline generation. Needs rich; imported only when shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)


@contextmanager
def prompt_bar(num_prompts: int) -> Iterator[Callable[[int, bool], None]]:
    """A bar on stderr; the yielded function takes (output tokens, whether a prompt is finished)."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    began, tokens = perf_counter(), 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("prompts", total=num_prompts, rate="")

        def advance(num_tokens: int, finished: bool) -> None:
            nonlocal tokens
            tokens += num_tokens
            rate = f"{tokens / max(perf_counter() - began, 1e-9):.0f} tok/s"
            bar.update(task, advance=int(finished), rate=rate)

        yield advance
