"""Plans, exactly: budgets, block ids, prefix hits, order, preemption, gates, drafts, windows."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit.api import ConfigError, EngineBusy, ErrorInfo, InvalidParam, RequestTooLarge, SchedLimits, StepResult
from lmkit.scheduling.scheduler import Scheduler
from lmkit_testing.hash_model import expected_tokens, hash_kv
from lmkit_testing.stepper import ArrivalOrder, Stepper, make_request


def work(plan) -> list[tuple[str, int, int, bool]]:
    return [(row.id, row.start, row.num_tokens, row.sample) for row in plan.rows]


# ------------------------------------------------------------------------------------------- budget and block ids


def test_prefill_in_chunks_shares_steps_with_decodes():
    s = Stepper(max_tokens=6)
    s.add("a", range(4), arrival=1.0)
    assert work(s.step()) == [("a", 0, 4, True)]
    s.add("b", range(50, 63), arrival=2.0)
    assert work(s.step()) == [("a", 4, 1, True), ("b", 0, 5, False)]
    assert work(s.step()) == [("a", 5, 1, True), ("b", 5, 5, False)]
    assert work(s.step()) == [("a", 6, 1, True), ("b", 10, 3, True)]
    assert work(s.step()) == [("a", 7, 1, True), ("b", 13, 1, True)]


def test_rows_of_one_token_come_first():
    s = Stepper(max_tokens=8)
    s.add("a", range(12), arrival=0.0)
    s.add("b", [50], arrival=1.0)
    assert work(s.step()) == [("a", 0, 8, False)]
    assert work(s.step()) == [("b", 0, 1, True), ("a", 8, 4, True)]


def test_the_limit_of_rows_is_kept():
    s = Stepper(max_rows=2)
    for rid in "abc":
        s.add(rid, [1, 2], 2)
    assert [row.id for row in s.step().rows] == ["a", "b"]
    assert [row.id for row in s.step().rows] == ["a", "b"]
    assert [row.id for row in s.step().rows] == ["c"]


def test_block_ids_and_diffs():
    s = Stepper(hash_kv(9, 4))
    s.add("a", range(6), 8)
    s.add("b", range(50, 53), 8)
    plan = s.step()
    assert [(n.id, n.blocks, n.tokens, n.num_computed) for n in plan.new] == [
        ("a", [[1, 2]], list(range(6)), 0),
        ("b", [[3]], [50, 51, 52], 0),
    ]
    assert plan.grown == []
    assert s.step().grown == [], "position 6 of a and 3 of b have their blocks"
    assert s.step().grown == [("b", [[4]])]
    assert s.step().grown == [("a", [[5]])]
    assert s.table("a") == [1, 2, 5]
    assert s.table("b") == [3, 4]


def test_a_finished_row_is_gone_with_the_next_plan_once():
    s = Stepper()
    s.add("a", [1], 1)
    s.step()
    assert s.events["a"][-1].finish == "length"
    assert s.scheduler.has_work(), "workers still hold the row"
    assert s.step().gone == ["a"]
    assert not s.scheduler.has_work()


# --------------------------------------------------------------------------------------------------- prefix cache


def test_prefix_hits_are_whole_blocks_and_counted_once():
    s = Stepper()
    s.add("a", range(10), 3)
    s.run()
    s.add("b", [*range(9), 77], 3)
    plan = s.step()
    assert work(plan) == [("b", 8, 2, True)]
    assert plan.new[0].num_computed == 8
    assert plan.new[0].blocks[0][:2] == [1, 2]
    s.run()
    assert [e.num_cached for e in s.events["b"]] == [8, None, None]
    stats = s.scheduler.stats()
    assert (stats.num_cached_tokens, stats.num_cache_queries) == (8, 20)


def test_of_a_fully_cached_prompt_the_last_block_is_computed():
    s = Stepper()
    s.add("a", range(8), 4)
    s.run()
    s.add("b", range(8), 4)
    assert work(s.step()) == [("b", 4, 4, True)]
    s.run()
    assert s.tokens("a") == s.tokens("b")


def test_output_is_found_by_the_next_turn():
    s = Stepper()
    s.add("a", range(6), 7)
    s.run()
    s.add("b", [*range(6), *s.tokens("a"), 1, 2], 2)
    s.step()
    assert s.events["b"][0].num_cached == 12, "the last output token was never computed"


def test_equal_prompts_in_one_step_share_blocks():
    s = Stepper()
    for rid in "abc":
        s.add(rid, range(10), 3)
    assert work(s.step()) == [("a", 0, 10, True), ("b", 8, 2, True), ("c", 8, 2, True)]
    assert s.table("a")[:2] == s.table("b")[:2] == s.table("c")[:2]
    s.run()
    assert s.tokens("a") == s.tokens("b") == s.tokens("c")


@pytest.mark.parametrize("other", [{"salt": "x"}, {"adapter": "x"}])
def test_salt_and_adapter_share_with_their_own_only(other):
    s = Stepper()
    s.add("a", range(9), 1)
    s.run()
    for rid, options, cached in (("b", other, 0), ("c", other, 8), ("d", {}, 8)):
        s.add(rid, range(9), 1, **options)
        s.run()
        assert s.events[rid][0].num_cached == cached


def test_without_prefix_cache_nothing_is_found():
    s = Stepper(prefix_cache=False)
    for rid in "ab":
        s.add(rid, range(9), 1)
        s.run()
    assert s.events["b"][0].num_cached == 0
    assert not s.pools[0].cached


def test_eviction_takes_the_least_recently_used_tail():
    s = Stepper(hash_kv(8, 2), max_length=12)
    s.add("a", [1, 1, 2, 2, 3], 1)  # publishes blocks 1 and 2, and at its end 3
    s.run()
    s.add("b", [5, 5, 6, 6, 7], 1)  # takes the never used 4, 5 and 6
    s.run()
    assert list(s.pools[0].free) == [7, 3, 2, 1, 6, 5, 4]
    s.add("c", [8, 8, 9, 9, 9], 1)
    s.run()
    s.add("d", [1, 1, 2, 2, 3], 1)
    s.step()
    assert s.events["d"][0].num_cached == 2, "of a the tail was evicted, the head is there"


def test_prompt_logprobs_are_computed_not_found():
    s = Stepper()
    s.add("a", range(9), 1)
    s.run()
    r = s.add("b", range(9), 1, prompt_logprobs=1)
    assert work(s.step()) == [("b", 0, 9, True)]
    entries = [entry for e in s.events["b"] for entry in e.prompt_logprobs]
    assert [entry.token for entry in entries] == list(range(1, 9))
    assert r.num_cached == 0
    s.run()
    s.add("c", range(9), 1)
    s.run()
    assert s.events["c"][0].num_cached == 8, "others find what it computed"


def test_prompt_logprobs_come_once_also_after_preemption():
    s = Stepper(hash_kv(8, 2), max_tokens=4, max_length=14)
    s.add("a", [1, 2], 12, arrival=0.0)
    b = s.add("b", range(20, 26), 6, arrival=1.0, prompt_logprobs=0)
    s.run()
    assert b.started.num_preempted
    assert [entry.token for e in s.events["b"] for entry in e.prompt_logprobs] == list(range(21, 26))


# ----------------------------------------------------------------------------------------------- order, preemption


def test_priority_then_arrival_decide_who_starts():
    s = Stepper(max_rows=1)
    s.add("late", [1], 1, arrival=2.0)
    s.add("early", [1], 1, arrival=1.0)
    s.add("urgent", [1], 1, arrival=3.0, priority=-1)
    started = []
    while s.scheduler.has_work():
        started += [row.id for row in s.step().rows]
    assert started == ["urgent", "early", "late"]


def preempting(depth: int = 1) -> Stepper:
    """Three requests in 6 blocks of 2 tokens; each needs 5 in the end."""
    s = Stepper(hash_kv(7, 2), depth=depth, max_length=10, prefix_cache=False)
    for i, rid in enumerate("abc"):
        s.add(rid, [10 * i, 1], 8, arrival=float(i))
    return s


def test_the_last_in_order_is_preempted_and_resumes_as_a_new_row():
    s = preempting()
    seen = {}
    while s.scheduler.has_work():
        plan = s.step()
        for new in plan.new:
            seen.setdefault(new.id, []).append((new.epoch, len(new.tokens)))
        if plan.gone and not s.events.get("a", [None])[-1].finish:
            assert "a" not in plan.gone, "the oldest is never the victim"
            assert not plan.new, "nothing is admitted in a step that preempts"
    assert len(seen["a"]) == 1
    assert len(seen["c"]) > 1
    for rid in "bc":
        epochs = [epoch for epoch, _ in seen[rid]]
        lengths = [length for _, length in seen[rid]]
        assert len(set(epochs)) == len(epochs)
        assert lengths == sorted(lengths), "a resumed row brings what it has said"
    for i, rid in enumerate("abc"):
        want = expected_tokens(s.executor.model, [10 * i, 1], make_request("x", [1], 8).params)
        assert s.tokens(rid) == want


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_preemption_with_steps_in_flight(depth):
    s = preempting(depth)
    s.run()
    assert s.scheduler.stats().num_preempted > 0
    for i, rid in enumerate("abc"):
        want = expected_tokens(s.executor.model, [10 * i, 1], make_request("x", [1], 8).params)
        assert s.tokens(rid) == want


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_steps_in_flight_have_rows_of_their_own(depth):
    """As many each, whatever came and went before; in one step they are all together."""
    s = Stepper(depth=depth, apart=True, max_rows=16)
    for i in range(11):
        s.add(str(i), [i, 1], 12 if i % 4 else 4, arrival=float(i))
    plans = []
    while s.scheduler.has_work():
        plans.append(s.step())
        if len(plans) in (3 * depth, 10 * depth):
            sizes = [len(plan.rows) for plan in plans[-depth:]]
            assert max(sizes) - min(sizes) <= 1
            assert len({row.id for plan in plans[-depth:] for row in plan.rows}) == sum(sizes)
            assert sum(sizes) == (11 if len(plans) == 3 * depth else 8)
    for i in range(11):
        want = expected_tokens(s.executor.model, [i, 1], make_request("x", [1], 12 if i % 4 else 4).params)
        assert s.tokens(str(i)) == want


def test_the_lowest_priority_is_preempted():
    s = Stepper(hash_kv(7, 2), max_length=10, prefix_cache=False)
    s.add("low", [1, 1], 8, priority=5, arrival=0.0)
    s.step()
    s.add("high", [2, 2], 8, priority=0, arrival=1.0)
    gone = []
    while not s.events.get("high") or not s.events["high"][-1].finish:
        gone += s.step().gone
    assert gone == ["low"]
    s.run()


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_every_request_ends_without_aborts(data, depth, block_size, prefix_cache):
    """As many as like, in a cache that one of them can fill: bounded by the work that each has alone, plus waste."""
    kv, budget = hash_kv(-(-12 // block_size) + 1, block_size), data.draw(st.integers(1, 6))
    s = Stepper(kv, depth=depth, max_length=12, max_tokens=budget, prefix_cache=prefix_cache)
    sizes = data.draw(
        st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2)), min_size=1, max_size=8)
    )
    for i, (prompt, output, priority) in enumerate(sizes):
        s.add(str(i), [i] * prompt, output, priority=priority, arrival=float(i))
    steps = s.run(max_steps=2000)
    assert all(s.events[str(i)][-1].finish == "length" for i in range(len(sizes)))
    assert steps <= 4 * sum(prompt + 2 * output for prompt, output, _ in sizes) + 10


def test_admission_waits_for_room_for_the_whole_prompt():
    s = Stepper(hash_kv(11, 2), max_tokens=4, max_length=20)
    s.add("a", [1] * 4, 6)
    s.step()  # a holds 2 of 10 blocks
    s.add("b", range(20, 38), 2)
    assert [row.id for row in s.step().rows] == ["a"], "b needs 9 blocks, 7 are free"
    s.add("c", [5, 5], 2, arrival=1.0)
    assert [row.id for row in s.step().rows] == ["a"], "nobody overtakes b"
    s.run()


def test_who_does_not_fit_is_asked_again_when_blocks_change():
    s = Stepper(hash_kv(11, 4), max_length=40)
    s.add("a", [1] * 4, 12)
    s.step()
    s.add("b", range(50, 86), 2, arrival=1.0)
    asked, start = [], s.scheduler._start
    s.scheduler._start = lambda r, budget: (asked.append(s.scheduler.totals.num_steps), start(r, budget))[1]
    s.run()
    assert asked == [2, 6, 10, 13], "a takes a block in steps 2, 6 and 10, and ends in step 12"


def test_the_watermark_keeps_blocks_free_unless_the_engine_is_empty():
    s = Stepper(hash_kv(11, 2), max_length=20, watermark=0.5)
    s.add("a", [1] * 9, 2)
    s.add("b", [2] * 3, 2)
    assert [row.id for row in s.step().rows] == ["a"]
    s.run()
    assert s.tokens("b")


# ------------------------------------------------------------------------------------------------- windows, memory


def test_a_window_bounds_the_blocks_that_are_held():
    s = Stepper(hash_kv([64, 64], 4, (None, 8)), max_tokens=8)
    s.add("a", range(40), 40)
    held = []
    while s.scheduler.requests:
        s.step()
        if s.scheduler.requests:
            held.append([sum(map(bool, s.table("a", g))) for g in (0, 1)])
    assert max(full for full, _ in held) == 20
    assert max(sliding for _, sliding in held) <= 5
    assert {sliding for _, sliding in held[-20:]} <= {2, 3}, "8 positions lie in 2 or 3 blocks"


def test_freed_window_blocks_let_a_long_request_run_in_a_small_pool():
    s = Stepper(hash_kv(6, 4, (8,)), max_tokens=4, max_length=200)
    s.add("a", range(60), 90)
    s.run()
    assert len(s.tokens("a")) == 90


def test_hits_with_windows_need_only_the_window():
    s = Stepper(hash_kv([64, 8], 4, (None, 8)), max_tokens=16)
    s.add("a", range(32), 2)
    s.run()
    s.add("b", [*range(32), 5], 2)
    plan = s.step()
    assert s.events["b"][0].num_cached == 32
    assert plan.new[0].blocks[1][:6] == [0] * 6, "blocks out of the window stay null"
    assert all(plan.new[0].blocks[1][6:])
    s.run()
    params = make_request("x", [1], 2).params
    assert s.tokens("b") == expected_tokens(s.executor.model, [*range(32), 5], params)


# ------------------------------------------------------------------------------------------ refusals, gates, aborts


def test_what_cannot_fit_alone_is_refused_with_numbers():
    s = Stepper(hash_kv(5, 4), max_length=100)
    with pytest.raises(RequestTooLarge) as e:
        s.add("a", range(10), 7)
    assert (e.value.value, e.value.limit) == (17, 16)
    with pytest.raises(RequestTooLarge, match="101, the limit is 100"):
        s.add("a", [1], 100)
    s.add("a", range(10), 6)
    s.run()


def test_too_many_waiting_requests():
    s = Stepper(max_rows=1, max_waiting=2)
    s.add("a", [1], 4)
    s.step()
    s.add("b", [1], 1)
    s.add("c", [1], 1)
    with pytest.raises(EngineBusy, match="2 requests are waiting") as e:
        s.add("d", [1], 1)
    assert e.value.retryable
    s.run()
    s.add("d", [1], 1)
    s.run()


def test_an_id_in_use_is_refused_and_free_again_afterwards():
    s = Stepper()
    s.add("a", [1], 1)
    with pytest.raises(InvalidParam, match="id"):
        s.add("a", [2], 1)
    s.run()
    s.add("a", [2], 1)
    s.run()


def test_contradictory_limits_are_refused():
    kv = hash_kv(8, 4)
    for bad in ({"depth": 2, "lookahead": 1}, {"max_rows": 0}, {"max_tokens": 0}, {"depth": 0}):
        with pytest.raises(ConfigError):
            Scheduler(SchedLimits(**{"max_tokens": 8, "max_rows": 1, "max_length": 8, **bad}), kv, ArrivalOrder())


class Gate:
    name = "test"

    def __init__(self) -> None:
        self.is_open, self.failure = False, None

    def ready(self) -> bool:
        return self.is_open

    def error(self) -> ErrorInfo | None:
        return self.failure


def test_a_closed_gate_holds_one_request_back():
    s, gate = Stepper(), Gate()
    s.add("a", [1], 2, gates=[gate], arrival=0.0)
    s.add("b", [2], 2, arrival=1.0)
    assert [row.id for row in s.step().rows] == ["b"]
    gate.is_open = True
    assert [row.id for row in s.step().rows] == ["b", "a"]
    s.run()


def test_a_failed_gate_fails_its_request():
    s, gate = Stepper(), Gate()
    s.add("a", [1], 2, gates=[gate])
    s.step()
    gate.failure = ErrorInfo("grammar", "cannot compile")
    plan = s.scheduler.schedule()
    assert not plan.rows
    (event,) = s.scheduler.update(plan, StepResult(plan.step, []))
    assert (event.id, event.finish, event.error) == ("a", "error", gate.failure)
    assert not s.scheduler.has_work()


def test_no_news_after_an_abort_even_of_a_failed_gate():
    s, gate = Stepper(), Gate()
    gate.failure = ErrorInfo("grammar", "cannot compile")
    s.add("a", [1], 2, gates=[gate])
    plan = s.scheduler.schedule()
    s.scheduler.abort(["a"])
    assert s.scheduler.update(plan, StepResult(plan.step, [])) == []
    assert not s.scheduler.has_work()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 14), st.integers(1, 3), st.sampled_from(["a", "b", "c"]))
def test_abort_at_any_moment_leaves_nothing(moment, depth, victim):
    s = preempting(depth)
    for _ in range(moment):
        s.step()
    s.scheduler.abort([victim, "nobody"])
    s.scheduler.check()
    s.scheduler.abort([victim])
    s.run()
    assert not s.executor.rows
    assert all(len(pool.free) == pool.num_usable for pool in s.pools)
    for i, rid in enumerate("abc"):
        want = expected_tokens(s.executor.model, [10 * i, 1], make_request("x", [1], 8).params)
        assert s.tokens(rid) == want[: len(s.tokens(rid))]
        assert rid == victim or s.tokens(rid) == want


def test_a_late_result_does_not_count_for_a_new_request_of_the_same_name():
    s = Stepper(depth=2)
    s.add("a", [1, 2], 8)
    s.step()
    s.scheduler.abort(["a"])
    s.add("a", [3, 4], 8)
    s.run()
    assert s.tokens("a") == expected_tokens(s.executor.model, [3, 4], make_request("x", [1], 8).params)


def test_the_first_tokens_of_each_stay_say_how_it_came_to_them():
    """The clock goes on by a second a step: `c` waits for a row, and later loses its blocks to others."""
    s = Stepper(hash_kv(7, 2), max_length=10, max_tokens=4, prefix_cache=False, max_rows=2)
    now = [0.0]
    s.scheduler.clock = lambda: now[0]
    s.add("a", range(7), 3, arrival=0.0)
    s.add("b", [1], 9, arrival=1.0)
    s.add("c", [2], 9, arrival=2.0)
    while s.scheduler.has_work():
        now[0] += 1.0
        s.step()
    told = {rid: [e.started for e in events if e.started is not None] for rid, events in s.events.items()}
    assert all(events[0].started is not None for events in s.events.values())
    assert (told["a"][0].queued, told["a"][0].prefill, told["a"][0].num_chunks) == (1.0, 1.0, 2), "7 tokens, 4 a step"
    assert told["b"][0].queued == 2.0, "the whole first step was given to a"
    assert told["c"][0].queued > 2.0
    again = max((one for stays in told.values() for one in stays), key=lambda one: one.num_preempted)
    assert again.num_preempted
    assert again.stalled > 0
    assert sum(len(stays) for stays in told.values()) == 3 + s.scheduler.stats().num_preempted


# ------------------------------------------------------------------------------------------------ drafts, failures


def test_drafts_are_verified_and_rejected_ones_taken_back():
    want = expected_tokens(Stepper().executor.model, [1, 2], make_request("x", [1], 9).params)
    answers = iter([[want[1], want[2], 96], [], [want[4]], [95, 94], [], [], [], []])
    s = Stepper(lookahead=3, executor={"num_drafts": 3, "propose": lambda tokens, k: next(answers)})
    r = s.add("a", [1, 2], 9)
    assert work(s.step()) == [("a", 0, 2, True)]
    plan = s.step()
    assert plan.rows[0].drafts == [want[1], want[2], 96]
    assert work(plan) == [("a", 2, 4, True)]
    assert s.tokens("a") == want[:4], "two drafts were right, the third was not"
    assert [event.drafts for event in s.events["a"]] == [None, (3, 2)]
    assert r.num_computed == 5
    s.run()
    assert s.tokens("a") == want


def test_drafts_never_exceed_what_is_left():
    s = Stepper(lookahead=3, executor={"num_drafts": 3, "propose": lambda tokens, k: [1] * k})
    s.add("a", [1], 3)
    most = []
    while s.scheduler.has_work():
        most += [len(row.drafts) for row in s.step().rows]
    assert most[:2] == [0, 1]


@pytest.mark.parametrize("meanwhile", ["nothing", "abort"])
def test_nobody_finds_what_a_faulty_row_wrote(meanwhile):
    s = Stepper(depth=2, executor={"fault": lambda row: "nan" if row.id == "bad" else None})
    s.add("good", range(40, 50), 20)
    s.add("bad", range(9), 4)
    s.step()
    assert s.pools[0].cached, "published as soon as scheduled"
    if meanwhile == "abort":
        s.scheduler.abort(["bad"])
    s.step()
    assert not s.pools[0].cached
    s.add("next", range(9), 4)
    s.run()
    assert s.events["next"][0].num_cached == 0
    assert s.events["next"][-1].finish == s.events["good"][-1].finish == "length"
    assert meanwhile == "abort" or s.events["bad"][-1].finish == "error"


def test_fail_running_ends_rows_and_empties_the_cache():
    s = Stepper(max_rows=1)
    s.add("a", range(9), 8)
    s.add("b", range(9), 8)
    s.step()
    error = ErrorInfo("engine", "lost")
    (event,) = s.scheduler.fail_running(error)
    assert (event.id, event.error) == ("a", error)
    s.scheduler.check()
    plan = s.scheduler.schedule()
    assert plan.gone == [], "workers have forgotten all rows already"
    assert work(plan) == [("b", 0, 9, True)]


def test_same_story_same_plans_in_every_process():
    """Byte for byte, whatever the hash seed: all ranks must agree."""
    code = "from lmkit_testing.trials import run_trials; print(run_trials(range(60)).digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1")
    }
    assert len(digests) == 1


def test_stats():
    s = Stepper(hash_kv([10, 12], 4, (None, 8)), max_rows=1)
    s.add("a", range(5), 2)
    s.add("b", range(5), 2)
    s.step()
    stats = s.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks, stats.num_free_blocks) == (1, 1, 20, 16)
    s.run()
    stats = s.scheduler.stats()
    assert (stats.num_finished, stats.num_prompt_tokens, stats.num_output_tokens) == (2, 10, 4)
    assert stats.num_free_blocks == 20
