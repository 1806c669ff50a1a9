"""StoreConnector: a KVConnector around a store that may be slow, fail, lie or disappear."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Condition, Thread
from time import monotonic
from typing import TYPE_CHECKING, Literal, Protocol

from lmkit_stores.events import Publisher
from lmkit_stores.fingerprint import fingerprint
from lmkit_stores.frames import opened, sealed

if TYPE_CHECKING:
    from lmkit.api import CachedBlock, Checkpoint, KVConfig, KVKey, ResolvedPlan

    from lmkit_stores.options import StoreOptions

log = logging.getLogger("lmkit.kv")

READERS = 4  # threads: so many requests are read for at once
LAST_SECONDS = 2.0  # in which what was still to be written is, at the end


class Store(Protocol):
    """Keeps frames. `read` and `write` are called from threads of the connector, may take their time and may raise
    whatever they do; what is wrong in a frame is noticed."""

    def read(self, keys: Sequence[KVKey]) -> Iterator[bytes | None]:
        """The frame of each key, in order; None: it has none. The caller may stop early."""
        ...

    def write(self, key: KVKey, frame: bytes) -> None: ...
    def has(self, key: KVKey) -> bool:
        """Whether writing would be in vain; where that is not known at once, False. From the engine's thread."""
        ...

    # Optional: `drop(key) -> None` removes a frame that turned out to be damaged when it was read, so that the block is
    # written again the next time it is computed. From the threads that read.

    def close(self) -> None:
        """Idempotent, from any thread, also while another one reads."""
        ...


@dataclass(slots=True)
class Fetch:
    """What a request waits for."""

    keys: Sequence[KVKey]
    until: float  # when it goes on with what has come
    found: dict[KVKey, bytes] = field(default_factory=dict)
    begun: bool = False
    done: bool = False
    dropped: bool = False  # nobody waits any more


class StoreConnector:
    """Contract: lmkit.api.KVConnector."""

    def __init__(
        self, store: Store, checkpoint: Checkpoint, resolved: ResolvedPlan, kv: KVConfig, options: StoreOptions, *,
        saves: Literal["computed", "evicted", "never"] = "computed",
    ) -> None:  # fmt: skip
        """`saves`: which blocks the store gets. Owns `store`."""
        self.store, self.options, self.saves = store, options, saves
        self.fingerprint = fingerprint(checkpoint, resolved, kv)
        self._sizes = [spec.bytes_per_block for spec in kv.specs]
        self._whole = [spec.kind == "full" for spec in kv.specs]  # groups in which a gap ends the prefix
        self._most = options.memory << 20
        self._lock = Condition()
        self._fetches: dict[str, Fetch] = {}
        self._jobs: SimpleQueue[Fetch] = SimpleQueue()
        self._held = 0  # bytes that were read and not yet given
        self._writes: dict[KVKey, bytes] = {}  # until they are written, in this order
        self._written = 0  # bytes that are still to be written
        self._resting = 0.0  # until when the store is left alone
        self._closed = False
        self.num_dropped = 0  # blocks that were not written
        self.events = None
        if options.events:
            self.events = Publisher(
                options.events, kv.specs[0].block_size, topic=options.events_topic, replay=options.events_replay,
                replica=resolved.value("replica", 0),
            )  # fmt: skip
        for i in range(READERS):
            Thread(target=self._read_all, name=f"lmkit-kv-read-{i}", daemon=True).start()
        Thread(target=self._write_all, name="lmkit-kv-write", daemon=True).start()

    # ------------------------------------------------------------------------------------------ the engine's thread

    def fetch(self, id: str, keys: Sequence[KVKey]) -> Mapping[KVKey, bytes] | None:
        now = monotonic()
        with self._lock:
            job = self._fetches.get(id)
            if job is None:
                if now < self._resting or self._closed:
                    return {}
                job = self._fetches[id] = Fetch(keys, now + self.options.seconds)
                self._jobs.put(job)
            if not job.done and now < job.until:
                return None
            late = job.begun and not job.done  # where it has not begun, other requests were before it
            self._drop(id)
        if late:
            self._rest(f"had not given all blocks of a request after {self.options.seconds:g} s")
        return job.found

    def cached(self, block: CachedBlock) -> None:
        if self.events is not None and block.key[0] == 0:
            self.events.stored(block)

    def computed(self, key: KVKey, parent: bytes, tokens: Sequence[int]) -> bool:
        return self.saves == "computed" and self._wants(key)

    def evicted(self, key: KVKey) -> bool:
        if self.events is not None and key[0] == 0:
            self.events.removed(key[1])
        return self.saves == "evicted" and self._wants(key)

    def _wants(self, key: KVKey) -> bool:
        return monotonic() >= self._resting and key not in self._writes and not self.store.has(key)

    def save(self, blocks: Sequence[tuple[KVKey, bytes]]) -> None:
        with self._lock:
            for key, content in blocks:
                if self._written + len(content) > self._most or self._closed:
                    self.num_dropped += 1
                elif key not in self._writes:
                    self._writes[key] = content
                    self._written += len(content)
            self._lock.notify_all()

    def forget(self) -> None:
        if self.events is not None:
            self.events.cleared()

    def release(self, id: str) -> None:
        with self._lock:
            self._drop(id)

    def close(self) -> None:
        """Waits a little for what is still to be written."""
        self.flush(LAST_SECONDS)
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for id in list(self._fetches):
                self._drop(id)
            self._lock.notify_all()
        for _ in range(READERS):
            self._jobs.put(Fetch((), 0.0, dropped=True))
        self.store.close()
        if self.events is not None:
            self.events.close()

    def flush(self, seconds: float) -> bool:
        """Whether all that was saved is written, waiting so long for it."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._writes, seconds)

    def _drop(self, id: str) -> None:
        job = self._fetches.pop(id, None)
        if job is not None:
            job.dropped = True
            self._held -= sum(map(len, job.found.values()))

    # -------------------------------------------------------------------------------------------- the other threads

    def _read_all(self) -> None:
        while not self._closed:
            job = self._jobs.get()
            if job.dropped:
                continue
            job.begun = True
            try:
                self._read(job)
            except Exception as e:
                self._rest(f"failed: {type(e).__name__}: {e}")
            finally:
                with self._lock:
                    job.done = True

    def _read(self, job: Fetch) -> None:
        """Blocks are checked as they come; the first gap in a group that must have all ends it."""
        with self._lock:  # what is on its way there need not have arrived
            coming = {key: self._writes[key] for key in job.keys if key in self._writes}
        for key, frame in zip(job.keys, self.store.read(job.keys), strict=False):
            size = self._sizes[key[0]]
            content = coming.get(key) or (opened(key, frame, size) if frame is not None else None)
            if frame is not None and content is None:
                self._drop_damaged(key, frame, size)
            with self._lock:
                if job.dropped or self._held + size > self._most:
                    return
                if content is not None:
                    job.found[key] = content
                    self._held += size
                elif self._whole[key[0]]:
                    return

    def _drop_damaged(self, key: KVKey, frame: bytes, size: int) -> None:
        log.warning("a stored block of %d bytes is not what was saved (%d bytes); it is removed", len(frame), size)
        drop = getattr(self.store, "drop", None)
        if drop is not None:
            drop(key)

    def _write_all(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._writes or self._closed)
                if not self._writes:
                    return
                key, content = next(iter(self._writes.items()))
            try:
                if monotonic() < self._resting:
                    self.num_dropped += 1
                else:
                    self.store.write(key, sealed(key, content))
            except Exception as e:
                self.num_dropped += 1
                self._rest(f"failed: {type(e).__name__}: {e}")
            with self._lock:
                del self._writes[key]
                self._written -= len(content)
                self._lock.notify_all()

    def _rest(self, why: str) -> None:
        if not self._closed and monotonic() >= self._resting:
            log.warning("the KV store %s; it is left alone for %g s", why, self.options.pause)
            self._resting = monotonic() + self.options.pause
