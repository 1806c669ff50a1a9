"""Containment of plugins' code while it is imported, asked and probed: it neither writes to standard output, which is a
command's own, nor ends the process unseen."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any, NoReturn

MAX_SHOWN = 200  # characters of what was printed


class Printed(io.TextIOBase):
    """In place of standard output: what is written goes to standard error, and closing it closes nothing."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}  # thread -> the beginning of what it printed

    def write(self, text: str) -> int:
        thread = get_ident()
        if thread in self.texts:
            self.texts[thread] = (self.texts[thread] + text)[:MAX_SHOWN]
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()

    def fileno(self) -> int:
        return sys.stderr.fileno()

    def close(self) -> None:
        """Does nothing: standard output stays open."""


_printed, _lock = Printed(), Lock()
_depth = 0  # of `contained` blocks, in all threads
_saved: tuple[Any, Any] = (None, None)  # standard output and os._exit, as they were
_process = 0


class Inside:
    """One `contained` block: the threads in which plugins' code runs, and what it prints there."""

    def __init__(self) -> None:
        self._threads: list[int] = []

    def enter(self) -> None:
        """Called in a thread that is going to run a plugin's code."""
        self._threads.append(get_ident())
        _printed.texts[get_ident()] = ""

    def leave(self) -> str:
        """The beginning of what its threads have printed."""
        return "".join(_printed.texts.pop(thread, "") for thread in self._threads)


@contextmanager
def contained() -> Iterator[Inside]:
    """Inside, standard output is standard error, and `os._exit` raises SystemExit in threads that have entered.

    Whoever waits for such a thread holds the block, so that one that never ends keeps nothing.
    """
    global _depth, _saved, _process
    inside = Inside()
    with _lock:
        if not _depth:
            _process, _saved = os.getpid(), (sys.stdout, os._exit)
            sys.stdout, os._exit = _printed, _refused_exit
        _depth += 1
    try:
        yield inside
    finally:
        with _lock:
            inside.leave()
            _depth -= 1
            if not _depth:
                sys.stdout = _saved[0] if sys.stdout is _printed else sys.stdout
                os._exit = _saved[1]


def _refused_exit(status: int) -> NoReturn:
    """`os._exit` for plugins: a child that was forked may end itself, the process of a command may not be ended."""
    if os.getpid() == _process and get_ident() in _printed.texts:
        raise SystemExit(f"os._exit({status}) would have ended the process")
    _leave(status)


_leave = os._exit
