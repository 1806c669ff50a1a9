"""Threads that prepare requests: parsing, rendering, tokenizing. Large requests have one of their own.

So small requests are never behind large ones, and the event loop is behind none.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from lmkit.api import EngineBusy

LARGE = 128 << 10  # bytes
MAX_LARGE = 16  # large requests that may wait
_SMALL_THREADS = 4

Result = TypeVar("Result")


class Workers:
    """Used from the event loop."""

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(_SMALL_THREADS, "lmkit-prepare")
        self._large = ThreadPoolExecutor(1, "lmkit-prepare-large")
        self._num_large = 0

    async def run(self, size: int, work: Callable[..., Result], *args: Any) -> Result:
        """`work(*args)` in a thread. `size`: bytes that came with the request. Raises EngineBusy."""
        loop = asyncio.get_running_loop()
        if size <= LARGE:
            return await loop.run_in_executor(self._small, work, *args)
        if self._num_large >= MAX_LARGE:
            raise EngineBusy(f"{MAX_LARGE} large requests are waiting to be read", fix="try again in a while")
        self._num_large += 1
        future = self._large.submit(_trimmed, work, *args)
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._done) if not loop.is_closed() else None)
        return await asyncio.wrap_future(future)

    def _done(self) -> None:
        self._num_large -= 1


def _trimmed(work: Callable[..., Result], *args: Any) -> Result:
    """Gives back what the work has freed: the C library keeps it otherwise, as fragments."""
    try:
        return work(*args)
    finally:
        trim()


def _find_trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # another C library
        return None


_malloc_trim = _find_trim()


def trim() -> None:
    """Takes a few milliseconds in which other threads run."""
    if _malloc_trim is not None:
        _malloc_trim(0)
