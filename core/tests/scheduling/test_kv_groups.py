"""Full and window groups against brute force; tables that drop what is out of the window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmkit.api import ConfigError, KVConfig
from lmkit.scheduling.blocks import BlockPool
from lmkit.scheduling.groups import NEVER, FullGroup, WindowGroup, hit_length, make_groups
from lmkit.scheduling.table import BlockTable
from lmkit_testing.hash_model import RECURRENT, expected_tokens, hash_kv
from lmkit_testing.stepper import Stepper, make_request

sizes = st.integers(1, 5)
windows = st.integers(1, 12)


@given(st.integers(0, 40), sizes, windows)
def test_droppable_blocks_are_those_no_later_position_reads(num_computed, size, window):
    group = WindowGroup(BlockPool(2), size, window)
    first_read = max(0, num_computed - window + 1)
    brute = next(i for i in range(100) if (i + 1) * size > first_read)
    assert group.droppable(num_computed) == brute


@given(st.integers(0, 10), sizes, windows)
def test_drop_at_is_where_one_more_block_becomes_droppable(dropped, size, window):
    group = WindowGroup(BlockPool(2), size, window)
    at = group.drop_at(dropped)
    assert group.droppable(at) > dropped
    assert at == 0 or group.droppable(at - 1) <= dropped


@given(st.sets(st.integers(0, 9)), st.integers(0, 10), sizes, windows)
def test_hit_length_by_brute_force(cached, limit, size, window):
    pool = BlockPool(20)
    names = [bytes([i]) for i in range(10)]
    for block, i in zip(pool.take(len(cached)), sorted(cached), strict=True):
        pool.publish(block, names[i])
    full, sliding = FullGroup(pool, size), WindowGroup(pool, size, window)

    def usable(group: FullGroup, n: int) -> bool:
        return all(i in cached for i in range(group.droppable(n * size), n))

    for group in (full, sliding):
        assert group.hit_length(names, limit) == max(n for n in range(limit + 1) if usable(group, n))
    both = max(n for n in range(limit + 1) if usable(full, n) and usable(sliding, n))
    assert hit_length([full, sliding], names, limit) == both
    assert hit_length([sliding, full], names, limit) == both


@given(st.integers(1, 60), st.integers(1, 20), sizes, windows, st.booleans(), st.randoms(use_true_random=False))
def test_blocks_needed_is_never_exceeded_and_is_reached(total, chunk, size, window, full, rng):
    pool = BlockPool(200)
    group = FullGroup(pool, size) if full else WindowGroup(pool, size, window)
    table, start, most = BlockTable([group]), 0, 0
    while start < total:
        n = min(total - start, rng.choice([1, chunk, rng.randint(1, chunk)]))
        assert table.reserve(start, n)
        start += n
        most = max(most, sum(map(bool, table.blocks[0])))
    assert most <= group.blocks_needed(total, chunk)
    assert most == group.blocks_needed(total, chunk) or not full


def test_a_full_group_never_drops():
    group = FullGroup(BlockPool(2), 4)
    assert group.droppable(1000) == 0
    assert group.drop_at(0) == NEVER


def test_a_table_drops_frees_and_keeps_its_place():
    groups = make_groups(hash_kv(20, 4, (None, 6)))
    table = BlockTable(groups)
    assert table.reserve(0, 12)
    assert table.blocks == [[1, 2, 3], [1, 2, 3]]
    assert table.reserve(12, 1)
    assert table.blocks == [[1, 2, 3, 4], [0, 2, 3, 1]], "position 12 reads 7 .. 12; block 1 is used again"
    assert [len(g.pool.free) for g in groups] == [15, 16]
    table.release()
    table.release()
    assert [len(g.pool.free) for g in groups] == [19, 19]


def test_reserve_takes_nothing_when_one_group_lacks_room():
    groups = make_groups(hash_kv([20, 3], 4, (None, 100)))
    table = BlockTable(groups)
    assert table.reserve(0, 8)
    assert not table.reserve(8, 4)
    assert table.blocks == [[1, 2], [1, 2]]
    assert len(groups[0].pool.free) == 17


def test_unsent_gives_each_entry_once():
    table = BlockTable(make_groups(hash_kv(20, 4, (None, 5))))
    table.reserve(0, 6)
    assert table.unsent() == [[1, 2], [1, 2]]
    assert table.unsent() == [[], []]
    table.reserve(6, 4)
    assert table.unsent() == [[3], [3]]


def test_what_cannot_be_scheduled_is_refused():
    kv = hash_kv(8, 4)
    spec = kv.specs[0]
    with pytest.raises(ConfigError, match="at least 2 blocks"):
        make_groups(hash_kv(1, 4))
    with pytest.raises(ConfigError, match="one block size"):
        make_groups(KVConfig((spec, hash_kv(8, 8).specs[0]), (8, 8)))
    cross = type(spec)("cross", (0,), 4, 1, 1, "float32", 16)
    with pytest.raises(ConfigError, match="cross"):
        make_groups(KVConfig((cross,), (8,)))


def test_a_request_holds_one_state():
    groups = make_groups(hash_kv([9, 3], 4, (None, RECURRENT)))
    first, second, third = (BlockTable(groups) for _ in range(3))
    assert first.reserve(0, 2)
    assert first.unsent() == [[1], [1]]
    assert first.reserve(2, 9)
    assert first.unsent() == [[2, 3], []]
    assert second.reserve(0, 1)
    assert not third.reserve(0, 1)  # two states, however many blocks are left
    first.release()
    assert third.reserve(0, 1)
    assert third.unsent()[1] == [1]


def test_state_cannot_be_taken_back():
    with pytest.raises(ConfigError, match="recurrent state"):
        Stepper(hash_kv(9, 4, (None, RECURRENT)), prefix_cache=False, lookahead=2)


def test_a_copy_of_the_state_is_kept_where_whole_blocks_of_a_prompt_end():
    s = Stepper(hash_kv([12, 4], 4, (None, RECURRENT)), max_tokens=16)
    prompt = list(range(10, 20))
    s.add("a", prompt, 4)
    first, second = s.step(), s.step()
    assert [(row.start, row.num_tokens) for plan in (first, second) for row in plan.rows] == [(0, 8), (8, 2)]
    assert (first.zero, first.copies) == ([(1, 1)], [])
    assert (second.zero, second.copies) == ([], [(1, 1, 2)])  # before the row goes on
    s.add("b", [*prompt[:8], 1, 2, 3, 4, 5, 6], 2)
    plan = s.step()
    assert (plan.zero, plan.copies) == ([], [(1, 2, 3)])
    assert [(row.id, row.start, row.num_tokens) for row in plan.rows] == [("a", 10, 1), ("b", 8, 4)]
    s.run()
    for rid, ids, num in (("a", prompt, 4), ("b", [*prompt[:8], 1, 2, 3, 4, 5, 6], 2)):
        assert s.tokens(rid) == expected_tokens(s.executor.model, ids, make_request(rid, ids, num).params)


def test_a_state_is_kept_where_prompts_part():
    s = Stepper(hash_kv([40, 9], 4, (None, RECURRENT)), max_tokens=32)
    common, parts = list(range(20, 29)), {}
    for rid, own in (("a", [1, 2, 3, 4, 5]), ("b", [6, 7, 8, 9, 10]), ("c", [11, 12, 13])):
        s.add(rid, common + own, 2)
        plans = [s.step() for _ in range(3)]
        parts[rid] = [(row.start, row.num_tokens) for plan in plans for row in plan.rows]
        s.run()
        assert s.tokens(rid) == expected_tokens(s.executor.model, common + own, make_request(rid, [], 2).params)
    assert parts["a"] == [(0, 12), (12, 2), (14, 1)]
    assert parts["b"] == [(0, 8), (8, 4), (12, 2)]  # the second of a kind knows what is common
    assert parts["c"] == [(8, 4), (12, 1)]  # and the third has it


def test_no_state_is_kept_where_all_are_in_use():
    s = Stepper(hash_kv([12, 2], 4, (None, RECURRENT)), max_tokens=16)
    s.add("a", list(range(10)), 2)
    assert [s.step().copies for _ in range(3)] == [[], [], []]
    s.run()
    s.add("b", list(range(10)), 2)
    assert s.step().zero == [(1, 1)]  # the blocks of its keys are found, but no state


def test_kept_states_give_way_to_rows():
    s = Stepper(hash_kv([40, 3], 4, (None, RECURRENT)), max_tokens=32)
    s.add("a", list(range(10)), 1)
    s.run()
    for rid in "bc":  # both states are taken
        s.add(rid, [90, *range(9)], 2)
    s.run()
    s.add("d", list(range(10)), 1)
    assert s.step().copies == []


def test_a_new_row_finds_zeros():
    s = Stepper(hash_kv([9, 2], 4, (None, RECURRENT)), prefix_cache=False)
    s.add("a", [1, 2, 3], 2)
    s.add("b", [4, 5], 1)
    assert s.step().zero == [(1, 1)]
    assert s.step().zero == []
    s.run()
    assert s.tokens("b") == expected_tokens(s.executor.model, [4, 5], make_request("b", [4, 5], 1).params)
