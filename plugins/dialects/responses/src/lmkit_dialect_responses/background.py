"""Answers in the background: accepted at once, made behind everything that clients wait for, and asked for by id.

They are kept where other answers are, in memory: nothing of them outlives the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from threading import Lock

import msgspec
from lmkit.api import RequestError
from lmkit_http.dialect import Answer, Incoming

from lmkit_dialect_responses.store import UNFINISHED, Kept, Store, progress

MAX_WAITING = 64  # answers of a tenant that are not finished
MAX_BYTES = 64 << 20  # of their requests
Ask = Callable[[Incoming], Awaitable[Answer]]
log = logging.getLogger("lmkit.responses")


class TooMany(RequestError):
    code = "too_many_in_background"
    status = 429
    field = "background"

    def __init__(self) -> None:
        super().__init__(
            f"{MAX_WAITING} answers or {MAX_BYTES >> 20} MiB of requests are in the background already",
            fix="wait for some of them, or cancel them",
        )


@dataclass(frozen=True)
class Later(Incoming):
    """A request that was accepted before, under the id of its answer."""

    id: str = ""


class Desk:
    """Runs on an event loop; what is not `work` may be called from any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = Lock()
        self._waiting: dict[str, Later] = {}  # not begun
        self._open: dict[str, Later] = {}  # not finished
        self._stopped: set[str] = set()  # to be given up
        self._wake: Callable[[], object] | None = None  # tells `work`, while it runs, that something has changed

    def accept(self, kept: Kept, later: Later) -> None:
        """`kept`: the answer as long as it is none. Raises TooMany."""
        with self._lock:
            theirs = [len(one.body) for one in self._open.values() if one.tenant == later.tenant]
            if len(theirs) >= MAX_WAITING or sum(theirs) + len(later.body) > MAX_BYTES:
                raise TooMany
            self._store.put(later.tenant, kept)
            self._waiting[later.id] = self._open[later.id] = later
        self._tell()

    def begin(self, later: Later) -> None:
        """It is its turn."""
        self._change(later, status="in_progress")

    def cancel(self, tenant: str, id: str) -> None:
        """A finished answer stays as it is. Raises NotKept."""
        kept = self._store.get(tenant, id)
        if progress(kept).status in UNFINISHED:
            self._change(Later("", tenant=tenant, id=id), status="cancelled")
        self.give_up(id)

    def give_up(self, id: str) -> None:
        """Nobody wants the answer any more. Idempotent."""
        with self._lock:
            if id in self._open:
                self._waiting.pop(id, None)
                self._stopped.add(id)
        self._tell()

    def _tell(self) -> None:
        if (wake := self._wake) is not None:
            wake()

    def _change(self, later: Later, **fields: object) -> None:
        """Writes into an answer that is not finished, if it is still kept."""
        self._finish(later, lambda body: msgspec.json.encode({**msgspec.json.decode(body), **fields}))

    def _finish(self, later: Later, change: Callable[[bytes], bytes]) -> None:
        self._store.replace(
            later.tenant, later.id, lambda kept: change(kept.body) if progress(kept).status in UNFINISHED else kept.body
        )

    async def work(self, ask: Ask) -> None:
        """Until it is cancelled: what is not finished then has failed."""
        news = asyncio.Event()  # belongs to this event loop
        self._wake = partial(asyncio.get_running_loop().call_soon_threadsafe, news.set)
        tasks: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                news.clear()
                with self._lock:
                    begun, self._waiting = self._waiting, {}
                    stopped, self._stopped = self._stopped, set()
                    for id in stopped:
                        if id not in tasks:
                            self._open.pop(id, None)
                for id, later in begun.items():
                    tasks[id] = asyncio.create_task(self._answer(later, ask))
                    tasks[id].add_done_callback(partial(self._done, tasks, id))
                for id in stopped & tasks.keys():
                    tasks[id].cancel()
                await news.wait()
        finally:
            running = list(tasks.values())
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            self._wake = None
            with self._lock:
                left, self._open, self._waiting = list(self._open.values()), {}, {}
            for later in left:
                self._fail(later, "the server is shutting down")

    async def _answer(self, later: Later, ask: Ask) -> None:
        try:
            answer = await ask(later)
            assert isinstance(answer.body, bytes)
            if answer.status == 200:
                body = answer.body
                self._finish(later, lambda _: body)
            else:
                self._fail(later, msgspec.json.decode(answer.body)["error"]["message"])
        except asyncio.CancelledError:
            self._fail(later, "the server is shutting down")  # where a client cancelled it, it has that status already
            raise
        except Exception:
            log.exception("an answer in the background could not be made")
            self._fail(later, "internal server error")

    def _done(self, tasks: dict[str, asyncio.Task[None]], id: str, _: asyncio.Task[None]) -> None:
        """Also of a task that was cancelled before it began."""
        tasks.pop(id, None)
        with self._lock:
            self._open.pop(id, None)

    def _fail(self, later: Later, message: str) -> None:
        self._change(later, status="failed", error={"code": "server_error", "message": message})
