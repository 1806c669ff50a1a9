"""Logs that never hold up who writes them: lines are bounded, and dropped and counted while nobody reads them."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

MAX_RECORD = 4 << 10  # characters
MAX_WAITING = 1000  # records
_FRAMES = 8  # of a traceback, at its end
_LAST_WORDS = 1.0  # seconds
_PAUSE = 0.02  # seconds between two looks for lines, warnings apart: each look takes the interpreter from the others
_CUT = " [...] "
FORMAT = "%(levelname)s %(name)s: %(message)s"
TIMED = "%(asctime)s %(levelname)s %(message)s"  # of a server


class _Formatter(logging.Formatter):
    def formatException(self, ei: Any) -> str:  # noqa: N802 - the library's name
        return "".join(traceback.format_exception(*ei, limit=-_FRAMES)).rstrip("\n")

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if len(text) <= MAX_RECORD:
            return text
        half = (MAX_RECORD - len(_CUT)) // 2
        return text[:half] + _CUT + text[-half:]


class _Json(_Formatter):
    """An object on each line. A record whose arguments are a mapping has them as fields of their own."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def format(self, record: logging.LogRecord) -> str:
        found = {"time": round(record.created, 3), "level": record.levelname.lower(), "process": self._part,
                 "logger": record.name, "message": record.getMessage()[:MAX_RECORD]}  # fmt: skip
        if isinstance(record.args, Mapping):
            found |= {name: value for name, value in record.args.items() if name not in found}
        if record.exc_info:
            found["error"] = self.formatException(record.exc_info)[-MAX_RECORD:]
        return json.dumps(found, ensure_ascii=False, default=str)


def write_json() -> None:
    """Lines of this process are JSON objects from now on."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogWriter):
            handler.setFormatter(_Json(handler.part))


class LogWriter(logging.Handler):
    """Writes to the descriptor in a thread of its own."""

    def __init__(self, descriptor: int, pattern: str = FORMAT, part: str = "lmkit") -> None:
        """`part`: which process it is, where lines are JSON."""
        super().__init__()
        self.part = part
        self.setFormatter(_Formatter(pattern))
        self._descriptor = descriptor
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._urgent = Event()
        self.num_dropped = 0
        self._thread = Thread(target=self._write, name="lmkit-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() >= MAX_WAITING:
            self.num_dropped += 1
            return
        try:
            self._lines.put(self.format(record))
            if record.levelno >= logging.WARNING:
                self._urgent.set()
        except Exception:
            self.handleError(record)

    def _write(self) -> None:
        lines: list[str | None] = []
        while None not in lines:
            lines = [self._lines.get()]
            while not self._lines.empty():
                lines.append(self._lines.get())
            dropped, self.num_dropped = self.num_dropped, 0
            if dropped:
                lines.append(f"{dropped} lines of the log were dropped: nobody read them")
            try:
                rest = "".join(f"{line}\n" for line in lines if line is not None).encode(errors="backslashreplace")
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError:  # there is nobody left to tell
                self.num_dropped = 0
            self._urgent.wait(_PAUSE)
            self._urgent.clear()

    def close(self) -> None:
        """Waits a moment for what is not written yet."""
        self._lines.put(None)
        self._urgent.set()
        self._thread.join(_LAST_WORDS)
        super().close()


@contextmanager
def written_logs(pattern: str = FORMAT, level: int = logging.WARNING, part: str = "lmkit") -> Iterator[None]:
    """Logs go to the standard error, unless whoever runs this process has said where they go."""
    root = logging.getLogger()
    if root.handlers:
        yield
        return
    handler = LogWriter(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, pattern, part)
    before = root.level
    root.addHandler(handler)
    root.setLevel(level)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        handler.close()
