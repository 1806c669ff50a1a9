"""Block ids and eviction order, exactly; and the pool against a naive model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from lmkit.scheduling.blocks import BlockPool


def test_blocks_are_taken_in_order_and_never_the_null_block():
    pool = BlockPool(5)
    assert pool.take(2) == [1, 2]
    assert pool.take(2) == [3, 4]
    assert not pool.free


def test_anonymous_blocks_are_reused_before_cached_ones_and_tails_before_heads():
    pool = BlockPool(7)
    old, new = pool.take(3), pool.take(2)
    pool.publish(old[0], b"a")
    pool.publish(old[1], b"b")
    pool.publish(new[0], b"c")
    pool.release(old)  # 3 is anonymous; of the cached ones the tail 2 goes before the head 1
    pool.release(new)  # 5 is anonymous; 4 was used last
    assert list(pool.free) == [5, 3, 6, 2, 1, 4]


def test_taking_a_cached_block_makes_its_content_unfindable():
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.publish(block, b"a")
    pool.release([block])
    assert pool.cached == {b"a": block}
    assert pool.take(1) == [block]
    assert pool.cached == {}


def test_a_hit_revives_a_free_block_and_makes_it_the_last_to_go():
    pool = BlockPool(4)
    blocks = pool.take(3)
    for block, digest in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.publish(block, digest)
    pool.release(blocks)
    assert list(pool.free) == [3, 2, 1]
    assert pool.num_revived([2]) == 1
    pool.touch([2])
    assert list(pool.free) == [3, 1]
    assert pool.num_revived([2]) == 0
    pool.release([2])
    assert list(pool.free) == [3, 1, 2]


def test_a_shared_block_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(3)
    (block,) = pool.take(1)
    pool.touch([block])
    pool.release([block])
    assert block not in pool.free
    pool.release([block])
    assert block in pool.free


def test_equal_content_is_published_once():
    pool = BlockPool(4)
    first, second = pool.take(2)
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    assert pool.cached == {b"a": first}
    pool.release([first, second])
    assert list(pool.free) == [second, 3, first], "the duplicate is reused first"


def test_forgotten_content_is_not_found():
    pool = BlockPool(4)
    blocks = pool.take(2)
    pool.publish(blocks[0], b"a")
    pool.publish(blocks[1], b"b")
    pool.release(blocks)
    pool.forget_since()
    assert pool.cached == {}
    pool.check([])


def test_releasing_too_often_is_noticed():
    pool = BlockPool(3)
    blocks = pool.take(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often than taken"):
        pool.release(blocks)


def test_check_names_what_is_broken():
    for spoil, words in (
        (lambda pool: pool.ref.__setitem__(1, 2), "number of tables"),
        (lambda pool: pool.free.pop(3), "free queue"),
        (lambda pool: pool.cached.__setitem__(b"x", 2), "inverse"),
    ):
        pool = BlockPool(5)
        table = pool.take(2)
        pool.check([table])
        spoil(pool)
        with pytest.raises(AssertionError, match=words):
            pool.check([table])
    pool = BlockPool(5)
    with pytest.raises(AssertionError, match="twice in one table"):
        pool.check([pool.take(1) * 2])


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of legal calls keeps the invariants, and never evicts a findable block before an anonymous one."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.tables: list[list[int]] = []
        self.num_names = 0

    @rule(n=st.integers(1, 4))
    def take(self, n: int) -> None:
        if n > len(self.pool.free):
            return
        num_anonymous = sum(self.pool.hashes[b] is None for b in self.pool.free)
        num_cached = len(self.pool.cached)
        self.tables.append(self.pool.take(n))
        assert len(self.pool.cached) == num_cached - max(0, n - num_anonymous), "evicted more than needed"

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), old=st.booleans())
    def publish(self, data: st.DataObject, old: bool) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.tables))))
        if self.pool.hashes[block] is None:
            self.num_names += not old
            self.pool.publish(block, str(self.num_names).encode())

    @precondition(lambda self: self.pool.cached)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        found = data.draw(st.lists(st.sampled_from(sorted(self.pool.cached.values())), unique=True, min_size=1))
        self.pool.touch(found)
        self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_since()

    @invariant()
    def holds(self) -> None:
        self.pool.check(self.tables)
        named = [self.pool.hashes[b] is not None for b in self.pool.free]
        assert named == sorted(named), "a findable block is reused before an anonymous one"


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase
