"""Threads that prepare requests: parsing, rendering, tokenizing. Large requests have some of their own, and so do those
that read and write files.

So small requests are never behind large ones or behind a disk, and the event loop is behind none. How many may wait
follows from the bytes of bodies that may be in memory together (see lmkit_http.body).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

LARGE = 128 << 10  # bytes
_SMALL_THREADS = 4
_FILE_THREADS = 8  # most of them wait for a disk
_TRIM_AFTER = 0.3  # seconds

Result = TypeVar("Result")


class Workers:
    """Used from the event loop."""

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(_SMALL_THREADS, "lmkit-prepare")
        self._large = ThreadPoolExecutor(min(4, max(1, (os.cpu_count() or 1) // 2)), "lmkit-prepare-large")
        self._files = ThreadPoolExecutor(_FILE_THREADS, "lmkit-files")
        self._trims = False  # memory is about to be given back

    async def run(self, size: int, work: Callable[..., Result], *args: Any, files: bool = False) -> Result:
        """`work(*args)` in a thread. `size`: bytes that came with the request; `files`: it reads or writes files."""
        loop = asyncio.get_running_loop()
        if files:
            return await loop.run_in_executor(self._files, work, *args)
        if size <= LARGE:
            return await loop.run_in_executor(self._small, work, *args)
        future = loop.run_in_executor(self._large, work, *args)
        future.add_done_callback(self._done)
        try:
            return await future
        finally:
            del future  # it may hold an error, whose frames hold this one and everything that is large

    def _done(self, future: asyncio.Future[Any]) -> None:
        if not self._trims:
            self._trims = True
            asyncio.get_running_loop().call_later(_TRIM_AFTER, self._trim)

    def _trim(self) -> None:
        """Gives back what large requests have freed: the C library keeps it otherwise."""
        self._trims = False
        if _malloc_trim is not None:
            self._small.submit(_malloc_trim, 0)


def _find_trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # another C library
        return None


_malloc_trim = _find_trim()
