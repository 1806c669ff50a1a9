"""What is in and what keys may still have, counted over all processes of a server, in memory that they share.

Each process writes its own cells and reads everybody's, so that only balances, which all change, need a lock. A process
that died is forgotten by the first one.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REQUESTS, BYTES, CONNECTIONS = range(3)  # columns; behind them the requests of each key
_OWN = 3
_CELL = 8  # bytes: a double
_BALANCES = 4  # cells of a key: two balances, each with the time that it is of


class Counts:
    """`place`: of this process, of `processes`; the file is made by the first one."""

    def __init__(self, path: Path, tenants: Sequence[str], processes: int, place: int = 0) -> None:
        self._processes, self._place = processes, place
        self._columns = {tenant: _OWN + i for i, tenant in enumerate(tenants)}
        own = processes * (_OWN + len(tenants))
        self._balances = {tenant: own + _BALANCES * i for i, tenant in enumerate(tenants)}
        size = _CELL * (own + _BALANCES * len(tenants))
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # for as long as the process lives
        if not place:
            os.ftruncate(self._file, size)
        self._cells = memoryview(mmap.mmap(self._file, size)).cast("d")

    def column(self, tenant: str) -> int:
        return self._columns[tenant]

    def put(self, column: int, value: float) -> None:
        """What this process has."""
        self._cells[column * self._processes + self._place] = value

    def total(self, column: int) -> int:
        at = column * self._processes
        return int(sum(self._cells[at : at + self._processes]))

    def least(self, column: int) -> int:
        """What the one has that has least, the first process left out."""
        at = column * self._processes
        return int(min(self._cells[at + 1 : at + self._processes]))

    def forget(self, place: int) -> None:
        """The process at `place` has nothing any more."""
        for column in range(_OWN + len(self._columns)):
            self._cells[column * self._processes + place] = 0.0

    @contextmanager
    def balance(self, tenant: str, which: int) -> Iterator[Any]:
        """A balance and its time, which nobody else changes meanwhile: two numbers that may be written.

        The kernel takes the lock from the dead.
        """
        import fcntl  # which not every system has: then there is one process

        at = self._balances[tenant] + 2 * which
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield self._cells[at : at + 2]
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
