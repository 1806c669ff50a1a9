"""KV beyond the pools: a connector's blocks come into free ones before a row begins, and it gets what steps wrote.

Only content that is here already stands in a plan, so nothing that a connector does, or fails to do, can make a step
wait or a row read what is not there: a request goes on with what came, and the rest is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import TypeVar

from lmkit.api import (
    CachedBlock,
    KVConfig,
    KVConnector,
    KVKey,
    PluginError,
    StepPlan,
    StepResult,
    is_interrupt,
)
from lmkit.scheduling.groups import FullGroup
from lmkit.scheduling.request import Request

log = logging.getLogger("lmkit.engine")

LOG_SECONDS = 60.0  # between two lines about one method of a connector that fails
Answer = TypeVar("Answer")


class GuardedConnector:
    """A plugin's KV connector, of which nothing can end the engine: one that raises has found, wanted or kept nothing.

    The log names it, once a minute for each method. What it brings is checked; one that cannot forget is not asked for
    blocks any more, for they may be wrong.
    """

    def __init__(
        self, connector: KVConnector, owner: str, kv: KVConfig, clock: Callable[[], float] = monotonic
    ) -> None:
        """`owner`: how the log names it. Raises PluginError for what has no fingerprint."""
        self._connector, self._owner, self._clock = connector, owner, clock
        self._sizes = [spec.bytes_per_block for spec in kv.specs]
        self._logged: dict[str, float] = {}  # method -> when the log last spoke of it
        self._num_silent: dict[str, int] = {}  # method -> failures since then
        self._may_fetch = True
        self.cached: Callable[[CachedBlock], None] | None = None  # of connectors that have it
        if (cached := getattr(connector, "cached", None)) is not None:
            self.cached = lambda block: self._call("cached", lambda: cached(block), None)
        self.fingerprint: str = getattr(connector, "fingerprint", "")
        if not isinstance(self.fingerprint, str) or not self.fingerprint:
            raise PluginError(
                f"{owner}: its fingerprint is {self.fingerprint!r:.80}, no text",
                fix="set `fingerprint` in the constructor: lmkit_stores.fingerprint_of makes one",
            )

    def fetch(self, id: str, keys: Sequence[KVKey]) -> Mapping[KVKey, bytes] | None:
        if not self._may_fetch:
            return {}
        nothing: Mapping[KVKey, bytes] | None = {}
        return self._call("fetch", lambda: self._checked(self._connector.fetch(id, keys)), nothing)

    def computed(self, key: KVKey, parent: bytes, tokens: Sequence[int]) -> bool:
        return self._call("computed", lambda: bool(self._connector.computed(key, parent, tokens)), False)

    def evicted(self, key: KVKey) -> bool:
        return self._call("evicted", lambda: bool(self._connector.evicted(key)), False)

    def save(self, blocks: Sequence[tuple[KVKey, bytes]]) -> None:
        self._call("save", lambda: self._connector.save(blocks), None)

    def forget(self) -> None:
        def forget() -> bool:
            self._connector.forget()
            return True

        if not self._call("forget", forget, False):
            self._may_fetch = False

    def release(self, id: str) -> None:
        self._call("release", lambda: self._connector.release(id), None)

    def close(self) -> None:
        self._call("close", self._connector.close, None)

    def _checked(self, found: object) -> Mapping[KVKey, bytes] | None:
        """Checks an answer of `fetch`. Raises TypeError or ValueError."""
        if found is None:
            return None
        if not isinstance(found, Mapping):
            raise TypeError(f"it gave {found!r:.80}, no mapping of keys to bytes")
        for key, content in found.items():
            size = self._sizes[key[0]]
            if not isinstance(content, bytes | bytearray | memoryview) or len(content) != size:
                raise ValueError(f"it gave a block that is not {size} bytes")
        return found

    def _call(self, method: str, function: Callable[[], Answer], nothing: Answer) -> Answer:
        try:
            return function()
        except BaseException as error:
            if is_interrupt(error):
                raise
            self._say(method, error)
            return nothing

    def _say(self, method: str, error: BaseException) -> None:
        now = self._clock()
        if now - self._logged.get(method, -LOG_SECONDS) < LOG_SECONDS:
            self._num_silent[method] = self._num_silent.get(method, 0) + 1
            return
        silent = self._num_silent.pop(method, 0)
        self._logged[method] = now
        more = f" ({silent} more times since the last line)" if silent else ""
        log.error(
            "%s: %s raised %s%s; the engine goes on without it",
            self._owner, method, type(error).__name__, more, exc_info=error,
        )  # fmt: skip


class Outside:
    """Between the pools of a scheduler and a connector."""

    def __init__(self, connector: KVConnector, groups: Sequence[FullGroup]) -> None:
        self.connector, self.pools, self.block_size = connector, [group.pool for group in groups], groups[0].block_size
        self._cached = getattr(connector, "cached", None)  # optional, of connectors that publish events
        for pool in self.pools:
            pool.evicted = []
        self._due: list[tuple[KVKey, int, int]] = []  # wanted: key, block, the step planned when it was published
        self._asked: dict[str, list[KVKey]] = {}  # requests that wait -> what for
        self._planned: dict[int, list[KVKey]] = {}  # step -> what its result brings

    def fetch(self, plan: StepPlan, r: Request, hashes: Sequence[bytes]) -> bool:
        """Whether `r` need not wait: what the connector has of it has come, and is loaded where there is room."""
        pools = list(enumerate(self.pools))
        keys = self._asked.pop(r.id, None) or [(i, d) for d in hashes for i, p in pools if d not in p.cached]
        found = self.connector.fetch(r.id, keys) if keys else {}
        if found is None:
            self._asked[r.id] = keys
            return False
        r.fetched = True
        for g, pool in enumerate(self.pools):
            here = [pool.renew(digest) for digest in hashes if digest in pool.cached]
            room = len(pool.free) - pool.num_revived(here)  # what is here already is not given up for the rest
            come = [i for i, digest in enumerate(hashes) if (g, digest) in found and digest not in pool.cached]
            for i in come[:room]:
                plan.loads.append((g, pool.keep(hashes[i]), found[g, hashes[i]]))
                self.computed(g, plan.loads[-1][1], r, i)
        return True

    def computed(self, group: int, block: int, r: Request, i: int) -> None:
        """`block` has whole block `i` of `r`, or will have it after the step that is being planned. It may be saved."""
        key, parent = (group, r.block_hashes[i]), r.block_hashes[i - 1] if i else r.root_hash
        tokens = r.tokens[i * self.block_size : (i + 1) * self.block_size]
        if self.connector.computed(key, parent, tokens):
            self._due.append((key, block, self.pools[group].step))
        if self._cached is not None:
            self._cached(CachedBlock(key, parent if i else None, tokens, r.adapter, r.salt))

    def settle(self, plan: StepPlan) -> None:
        """Completes a plan: workers first read the blocks that steps before it wrote, some of which it takes."""
        due = [(key, block) for key, block, step in self._due if step < plan.step]
        del self._due[: len(due)]
        for i, pool in enumerate(self.pools):
            gone = (one for one in pool.evicted or () if one[0] not in pool.cached)  # not what came back in this step
            evicted = [(((i, digest), block), step) for digest, block, step in gone]
            due += [one for one, step in evicted if self.connector.evicted(one[0]) and step < plan.step]
            pool.evicted = []
        plan.saves = [(key[0], block) for key, block in due]
        plan.loads = list({load[:2]: load for load in plan.loads}.values())  # a block may have been taken again
        if due:
            self._planned[plan.step] = [key for key, _ in due]

    def take_in(self, plan: StepPlan, result: StepResult) -> None:
        if keys := self._planned.pop(plan.step, None):
            self.connector.save(list(zip(keys, result.saved, strict=True)))

    def release(self, id: str) -> None:
        self._asked.pop(id, None)
        self.connector.release(id)

    def forget(self) -> None:
        """What lies in the pools, or is under way from them, may be wrong."""
        self._due.clear()
        self._planned.clear()
        for pool in self.pools:
            pool.evicted = []
        self.connector.forget()
