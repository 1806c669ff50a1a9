"""A bar for what an engine does before it answers."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn


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
