"""Conformance of KV connectors: what is saved is found again, whole or not at all, and nobody waits for ever."""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
from lmkit.api import KVConfig, KVConnector, KVKey

from lmkit_testing.engines import no_checkpoint, no_plan
from lmkit_testing.hash_model import hash_kv
from lmkit_testing.kv_trials import KVTrial
from lmkit_testing.specs import PluginConformance
from lmkit_testing.trials import Story

PATIENCE = 60.0  # seconds after which a connector that gives no answer has none: no measure of speed


def fetched(connector: KVConnector, id: str, keys: Sequence[KVKey]) -> Mapping[KVKey, bytes]:
    """What `fetch` gives in the end."""
    until = time.monotonic() + PATIENCE
    while (found := connector.fetch(id, keys)) is None:
        assert time.monotonic() < until, "fetch never gives up"
        time.sleep(0.001)
    return found


def settled(connector: KVConnector, keys: Sequence[KVKey]) -> Mapping[KVKey, bytes]:
    """What is found once the connector has had the time to write: asked until all keys are there."""
    until = time.monotonic() + PATIENCE
    while True:
        found = fetched(connector, f"settled {time.monotonic()}", keys)
        if len(found) == len(keys) or time.monotonic() > until:
            return found
        time.sleep(0.01)


class WaitingTrial(KVTrial):
    """A trial that lets the threads of a connector run while nothing else can."""

    def check_step(self) -> None:
        super().check_step()
        if self.engine.blocked:
            time.sleep(0.002)

    def check_cached(self, story: Story) -> None:
        """Who computed it may have been another engine."""


class KVConnectorConformance(PluginConformance):
    """`options` are those of the target; `make` may be overridden where more than them is needed. A connector that only
    observes the cache sets `keeps_blocks` to False: then it must ask for no block, and give none."""

    keeps_blocks: ClassVar[bool] = True
    kv: ClassVar[KVConfig] = hash_kv(64, 4, (None, 8))

    def options(self, tmp_path: Any) -> dict[str, Any]:
        return {}

    @pytest.fixture
    def make(self, target: Any, tmp_path: Any) -> Iterator[Callable[..., KVConnector]]:
        made: list[KVConnector] = []

        def one(kv: KVConfig = self.kv) -> KVConnector:
            made.append(target(no_checkpoint(), no_plan(), kv, **self.options(tmp_path)))
            return made[-1]

        yield one
        for connector in made:
            connector.close()

    def blocks(self, connector: KVConnector, num: int) -> list[tuple[KVKey, bytes]]:
        """New blocks of both groups, in the order of tokens; the connector was told of them."""
        parent = os.urandom(32)  # a store may outlive a test
        rng, found = random.Random(parent), []
        for i in range(num):
            digest = hashlib.sha256(parent).digest()
            for group, spec in enumerate(self.kv.specs):
                connector.computed((group, digest), parent, [i] * spec.block_size)
                found.append(((group, digest), rng.randbytes(spec.bytes_per_block)))
            parent = digest
        return found

    def test_what_is_saved_is_found(self, make: Callable[..., KVConnector]) -> None:
        connector = make()
        blocks = self.blocks(connector, 40)
        connector.save(blocks)
        if not self.keeps_blocks:
            assert not fetched(connector, "r", [key for key, _ in blocks])
            assert not any(connector.computed(key, b"", [1]) or connector.evicted(key) for key, _ in blocks)
            return
        assert settled(connector, [key for key, _ in blocks]) == dict(blocks)

    def test_the_beginning_is_found_where_the_rest_is_not(self, make: Callable[..., KVConnector]) -> None:
        if not self.keeps_blocks:
            return  # checked by test_what_is_saved_is_found
        connector = make()
        blocks = self.blocks(connector, 10)
        connector.save(blocks[:12])
        assert settled(connector, [key for key, _ in blocks[:12]]) == dict(blocks[:12])
        assert fetched(connector, "r", [key for key, _ in blocks]).items() <= dict(blocks[:12]).items()

    def test_nothing_is_found_of_what_nobody_saved(self, make: Callable[..., KVConnector]) -> None:
        connector = make()
        blocks = self.blocks(connector, 10)
        assert not fetched(connector, "r", [key for key, _ in blocks])

    def test_requests_come_and_go(self, make: Callable[..., KVConnector]) -> None:
        """Ended while they wait, unknown, ended twice, and an id that comes again."""
        connector = make()
        blocks = self.blocks(connector, 20)
        connector.save(blocks)
        keys = [key for key, _ in blocks]
        if self.keeps_blocks:
            settled(connector, keys)
        for i in range(50):
            connector.fetch(str(i % 5), keys)
            connector.release(str(i % 3))
        connector.release("unknown")
        for i in range(5):
            assert fetched(connector, str(i), keys).items() <= dict(blocks).items()
        connector.forget()

    def test_close(self, make: Callable[..., KVConnector]) -> None:
        connector = make()
        blocks = self.blocks(connector, 10)
        connector.fetch("waits", [key for key, _ in blocks])
        connector.close()
        connector.close()
        connector.release("waits")
        assert not fetched(connector, "late", [key for key, _ in blocks])

    def test_fingerprint(self, make: Callable[..., KVConnector]) -> None:
        """Equal for equal engines, another for another layout."""
        assert make().fingerprint == make().fingerprint != make(hash_kv(64, 8, (None, 8))).fingerprint

    @pytest.mark.parametrize("seed", range(35, 43))
    def test_no_token_changes(self, make: Callable[..., KVConnector], seed: int) -> None:
        """Random trials of the scheduler on the hash model, whose text shows any wrong block."""
        WaitingTrial(seed, lambda _, kv: make(kv)).run()


__all__ = ["KVConnectorConformance", "WaitingTrial", "fetched", "settled"]
