"""Threads that prepare requests: who waits for a disk keeps nobody waiting."""

from __future__ import annotations

import asyncio
import threading

from lmkit_http.workers import Workers


async def test_requests_that_wait_for_a_disk_are_beside_all_others() -> None:
    workers, disk = Workers(), threading.Event()
    waiting = [asyncio.ensure_future(workers.run(40, disk.wait, 60, files=True)) for _ in range(20)]
    try:
        await asyncio.sleep(0)
        assert await asyncio.wait_for(workers.run(40, lambda: "small"), 30) == "small"
        assert await asyncio.wait_for(workers.run(1 << 20, lambda: "large"), 30) == "large"
        assert not any(task.done() for task in waiting)
    finally:
        disk.set()
    assert all(await asyncio.gather(*waiting))
