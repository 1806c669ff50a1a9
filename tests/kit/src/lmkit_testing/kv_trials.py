"""Random trials of the scheduler with a KV connector that is slow, forgets, gives parts, or is gone; and mutants.

    python -m lmkit_testing.kv_trials 2000        trials with seeds 0 .. 1999, then every mutant
    python -m lmkit_testing.kv_trials --seed 17   one trial again

What a connector does must change no token, and end no request.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from unittest.mock import patch

from lmkit.api import KVConfig, KVConnector, KVKey, SchedLimits
from lmkit.scheduling.outside import Outside
from lmkit.scheduling.scheduler import Scheduler

from lmkit_testing.trials import KeyedOrder, Trial, command, require, run_trials


class ErraticConnector:
    """Keeps the contract of KVConnector, and promises nothing beyond it. Deterministic."""

    fingerprint = "hash-model"

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.evicts = rng.random() < 0.5  # saves what is evicted, else what is computed
        self.polls = rng.choice([0, 0, 1, 3, 20])  # that a fetch takes
        self.gives = rng.choice([0.3, 0.9, 1.0, 1.0])  # probability that it still has a block
        self.room = rng.choice([2, 30, 1000])  # blocks
        self.lives = rng.choice([20, 1 << 30, 1 << 30, 1 << 30])  # calls before it disappears
        self.held: dict[KVKey, bytes] = {}
        self.asked: dict[str, int] = {}  # requests that wait -> polls left
        self.num_given = 0
        self.told: set[KVKey] | None = set()  # what lies in the pools, as far as it was said; None: some was forgotten

    def _is_gone(self) -> bool:
        self.lives -= 1
        return self.lives < 0

    def fetch(self, id: str, keys: Sequence[KVKey]) -> Mapping[KVKey, bytes] | None:
        left = self.asked.setdefault(id, self.polls)
        if left and not self._is_gone():
            self.asked[id] = left - 1
            return None
        del self.asked[id]
        if self._is_gone():
            return {}
        require(len(set(keys)) == len(keys), "a block is asked for twice")
        found = {key: self.held[key] for key in keys if key in self.held and self.rng.random() < self.gives}
        self.num_given += len(found)
        return found

    def computed(self, key: KVKey, parent: bytes, tokens: Sequence[int]) -> bool:
        if self.told is not None:
            self.told.add(key)
        return not self.evicts and key not in self.held

    def evicted(self, key: KVKey) -> bool:
        if self.told is not None:
            require(key in self.told, "evicted, and was not there")
            self.told.remove(key)
        return self.evicts and key not in self.held

    def save(self, blocks: Sequence[tuple[KVKey, bytes]]) -> None:
        for key, content in blocks:
            if not self._is_gone():
                before = self.held.setdefault(key, content)
                require(before == content, "two contents of one block")
        while len(self.held) > self.room:
            del self.held[next(iter(self.held))]

    def forget(self) -> None:
        self.told = None

    def release(self, id: str) -> None:
        self.asked.pop(id, None)

    def close(self) -> None: ...


class KVTrial(Trial):
    """A trial whose scheduler has a connector, drawn from the same seed."""

    share_recurrent = 0.0

    def __init__(self, seed: int, make: Callable[[random.Random, KVConfig], KVConnector] | None = None) -> None:
        rng = random.Random(f"connector {seed}")

        def scheduler(limits: SchedLimits, kv: KVConfig) -> Scheduler:
            self.connector = make(rng, kv) if make is not None else ErraticConnector(rng)
            return Scheduler(limits, kv, KeyedOrder(rng.choice([0, 37])), connector=self.connector)

        super().__init__(seed, scheduler=scheduler)
        self.engine.intake = replace(self.engine.intake, fingerprint=self.connector.fingerprint)

    def check_end(self) -> None:
        super().check_end()
        if isinstance(self.connector, ErraticConnector):
            require(not self.connector.asked, "a request that ended is still waited for")
            assert isinstance(self.scheduler, Scheduler)
            pools = enumerate(group.pool for group in self.scheduler.groups)
            there = {(i, digest) for i, pool in pools for digest in pool.hashes if digest}
            require(self.connector.told in (None, there), "not told what lies in the pools")


Patches = tuple[object, str, object]


def saves_too_early() -> Patches:
    """A block is read in the step that computes it, before that has begun."""
    real = Outside.settle

    def settle(self, plan):
        self._due = [(key, block, -1) for key, block, _ in self._due]
        real(self, plan)

    return (Outside, "settle", settle)


def saves_next_to_last() -> Patches:
    """What is evicted is read under the name of another block."""
    real = Outside.take_in

    def take_in(self, plan, result):
        result.saved = result.saved[1:] + result.saved[:1]
        real(self, plan, result)

    return (Outside, "take_in", take_in)


def saves_rubbish() -> Patches:
    """What a faulty row wrote is saved all the same."""
    return (Outside, "forget", lambda self: None)


def groups_mixed_up() -> Patches:
    """The content of one group is loaded into another."""
    real = Outside.fetch

    def fetch(self, plan, r, hashes):
        num = len(plan.loads)
        here = real(self, plan, r, hashes)
        swapped = [(len(self.pools) - 1 - g, block, data) for g, block, data in plan.loads[num:]]
        plan.loads[num:] = swapped
        return here

    return (Outside, "fetch", fetch)


def loads_lost() -> Patches:
    """Blocks that should be loaded count as cached, and are not."""
    real = Outside.settle

    def settle(self, plan):
        real(self, plan)
        plan.loads = plan.loads[1:]

    return (Outside, "settle", settle)


def loads_what_is_computing() -> Patches:
    """Every block that came is loaded, also where the cache has one with that content already."""
    real = Outside.settle

    def settle(self, plan):
        real(self, plan)
        plan.loads = [(g, block - 1 or block, data) for g, block, data in plan.loads]

    return (Outside, "settle", settle)


MUTANTS = {
    make.__name__: make
    for make in (
        saves_too_early, saves_next_to_last, saves_rubbish, groups_mixed_up, loads_lost, loads_what_is_computing,
    )
}  # fmt: skip


def hunt(name: str, seeds: Iterable[int]) -> tuple[int, str] | None:
    """The first trial that finds the mutant, and how; None when none does."""
    owner, attribute, replacement = MUTANTS[name]()
    with patch.object(owner, attribute, replacement):
        for seed in seeds:
            try:
                KVTrial(seed).run()
            except Exception as e:
                return seed, f"{type(e).__name__}: {e}"[:90]
    return None


def main(argv: list[str] | None = None) -> int:
    def lines(seeds: range) -> list[str]:
        given = 0

        def trial(seed: int) -> Trial:
            nonlocal given
            done = KVTrial(seed)
            done.run()
            given += done.connector.num_given  # type: ignore[attr-defined]
            return done

        return [*run_trials(seeds, trial).lines(), f"  {'blocks from the connector':<28}{given:>9}"]

    def one(seed: int) -> None:
        KVTrial(seed).run()

    return command("kv_trials", __doc__, argv, one=one, lines=lines, faults=MUTANTS, hunt=hunt)


if __name__ == "__main__":
    sys.exit(main())
