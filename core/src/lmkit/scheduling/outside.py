"""KV beyond the pools: a connector's blocks come into free ones before a row begins, and it gets what steps wrote.

Only content that is here already stands in a plan, so nothing that a connector does, or fails to do, can make a step
wait or a row read what is not there: a request goes on with what came, and the rest is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from lmkit.api import CachedBlock, KVConnector, KVKey, StepPlan, StepResult
from lmkit.scheduling.groups import FullGroup
from lmkit.scheduling.request import Request


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
