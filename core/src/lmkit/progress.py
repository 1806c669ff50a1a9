"""Progress on a terminal: bars for loading and for offline generation. Needs rich; imported only when shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
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


class StartBar:
    """The engine's start-up phases on stderr, with bytes and rate. Callable as `lmkit.api.Progress`."""

    def __init__(self, enabled: bool | None = None) -> None:
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal if enabled is None else enabled:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, console=console, transient=True)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> StartBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, phase: str, done: int, total: int, unit: str = "B") -> None:
        if self._bar is None:
            return
        if phase not in self._tasks:
            self._tasks[phase] = self._bar.add_task(phase, total=total)
        self._bar.update(self._tasks[phase], completed=done, total=total)
