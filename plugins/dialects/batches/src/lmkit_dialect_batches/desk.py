"""The desk: batches that are not finished are worked on, whenever the server runs."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from functools import partial
from pathlib import Path

from lmkit_http.dialect import Answer
from lmkit_run_batch.lines import Fault, check_lines, requests
from lmkit_run_batch.play import Ask, play
from lmkit_run_batch.results import Results

from lmkit_dialect_batches.records import Batch, Status
from lmkit_dialect_batches.room import ShareFull, StoreFull
from lmkit_dialect_batches.store import Store
from lmkit_dialect_batches.uploads import Uploads

MAX_RUNNING = 32  # batches at a time
MAX_EACH = 2  # of a tenant: those of others need not wait for all of its
_SWEEP = 60.0  # seconds
log = logging.getLogger("lmkit.batches")


class Desk:
    """Runs on an event loop; `tell` may be called from any thread."""

    def __init__(self, store: Store, uploads: Uploads) -> None:
        self._store, self._uploads = store, uploads
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()
        self._stops: dict[str, asyncio.Event] = {}  # of running batches: somebody cancels them

    def tell(self) -> None:
        """There is a new batch, or one is to be cancelled."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._news.set)

    async def work(self, ask: Ask) -> None:
        """Until it is cancelled; the batches are on disk then as far as they got."""
        self._loop = asyncio.get_running_loop()
        running: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                self._news.clear()
                await self._sweep()
                running = {id: task for id, task in running.items() if not task.done()}
                each = Counter[str]()  # running batches of a tenant
                for batch in sorted(self._store.unfinished(), key=lambda batch: batch.id not in running):
                    if batch.id in running:
                        if batch.status == "cancelling":
                            self._stops[batch.id].set()
                    elif batch.status == "cancelling" or (each[batch.tenant] < MAX_EACH and len(running) < MAX_RUNNING):
                        self._stops[batch.id] = asyncio.Event()
                        running[batch.id] = asyncio.create_task(self._run(batch, ask))
                    else:
                        continue
                    each[batch.tenant] += 1
                try:
                    await asyncio.wait_for(self._news.wait(), _SWEEP)
                except TimeoutError:
                    pass
        finally:
            for task in running.values():
                task.cancel()
            await asyncio.gather(*running.values(), return_exceptions=True)

    async def _run(self, batch: Batch, ask: Ask) -> None:
        try:
            await self._process(batch, ask, self._stops[batch.id])
        except (OSError, StoreFull, ShareFull) as error:
            log.error("batch %s cannot go on: %s", batch.id, error)
            message = error.message if not isinstance(error, OSError) else "results could not be written"
            await self._fail(batch, Fault("storage", message))
        except Exception:
            log.exception("batch %s cannot go on", batch.id)
            await self._fail(batch, Fault("internal", "internal server error"))
        finally:
            self._news.set()

    async def _fail(self, batch: Batch, fault: Fault) -> None:
        """Where not even that can be written the batch goes on at the next start."""
        try:
            await asyncio.to_thread(self._store.fail, batch, [fault])
        except OSError:
            batch.status = "failed"

    async def _sweep(self) -> None:
        try:
            await asyncio.to_thread(self._store.sweep)
            await asyncio.to_thread(self._uploads.sweep)
        except OSError as error:
            log.error("old files cannot be removed: %s", error)

    async def _process(self, batch: Batch, ask: Ask, stop: asyncio.Event) -> None:
        store = self._store
        path = store.path(batch.input_file_id)
        if not batch.total:
            total, faults = await asyncio.to_thread(check_lines, path, batch.endpoint)
            if faults:
                await asyncio.to_thread(store.fail, batch, faults)
                return
            await asyncio.to_thread(store.begin, batch, total)
        output, errors = store.path(batch.output_id), store.path(batch.error_id)
        results = await asyncio.to_thread(Results, output, errors, partial(store.room.take, batch.tenant))

        def count(_: Answer | None = None) -> None:
            batch.completed, batch.failed = results.num_completed, results.num_failed

        try:
            count()
            if batch.status != "cancelling":
                playing = asyncio.create_task(play(requests(path), results, ask, batch.tenant, count))
                await self._until(playing, stop, batch.expires_at - store.now())
            end: Status = "completed" if len(results.ids) == batch.total else "expired"
            if batch.status == "cancelling":
                end = "cancelled"
            await asyncio.to_thread(_give_up, path, results, end)
            count()
        finally:
            await asyncio.to_thread(results.close)
        await asyncio.to_thread(store.finish, batch, end)

    @staticmethod
    async def _until(playing: asyncio.Task[None], stop: asyncio.Event, seconds: float) -> None:
        """Until all is answered, somebody cancels, or the time is over. Raises what `playing` does."""
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((playing, stopping), timeout=max(0.0, seconds), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            playing.cancel()
            await asyncio.gather(playing, stopping, return_exceptions=True)
        if not playing.cancelled():
            playing.result()


def _give_up(path: Path, results: Results, end: Status) -> None:
    """Requests that are not answered any more have their line, too."""
    message = {"cancelled": "the batch was cancelled before this request was answered",
               "expired": "the batch's time was over before this request was answered"}.get(end)  # fmt: skip
    if message is None:
        return
    for line in requests(path):
        if line.custom_id not in results.ids:
            results.given_up(line.custom_id, f"batch_{end}", message)
