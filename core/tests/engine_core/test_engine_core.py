"""The step loop: same text at every depth, faults stay with their request, failed steps and dead ranks."""

from __future__ import annotations

import pytest
from lmkit.api import (
    Choice,
    ConfigError,
    EngineDead,
    EngineRequest,
    ForgetRows,
    PluginError,
    Reply,
    ResolvedPlan,
    SamplingParams,
    SchedLimits,
    TokenEvent,
)
from lmkit.engine.build import _scheduler
from lmkit.engine.core import EngineCore
from lmkit.engine.intake import Intake, NoStructuredOutput
from lmkit.scheduling.scheduler import Scheduler
from lmkit_testing.hash_model import HashExecutor, expected_tokens, hash_kv
from lmkit_testing.stepper import ArrivalOrder


def make_engine(kv=None, *, limits=None, depth=1, **options) -> EngineCore:
    kv = kv or hash_kv(40, 4)
    limits = limits or {}
    executor = HashExecutor(kv, depth=depth, **options)
    limits = SchedLimits(**{"max_tokens": 16, "max_rows": 8, "max_length": 64, "depth": depth, **limits})
    return EngineCore(Scheduler(limits, kv, ArrivalOrder()), executor, Intake(executor.vocab_size, 64))


def request(rid: str, prompt: list[int], **params) -> EngineRequest:
    return EngineRequest(rid, prompt, SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **params}))


def run(engine: EngineCore, max_steps: int = 500) -> dict[str, list[TokenEvent]]:
    events: dict[str, list[TokenEvent]] = {}
    for _ in range(max_steps):
        if not engine.has_work():
            return events
        for event in engine.step():
            events.setdefault(event.id, []).append(event)
        engine.scheduler.check()
    raise AssertionError("the engine does not come to an end")


def tokens(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.tokens]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("windows", [(None,), (5,), (None, 6), (3, None, 9)])
def test_text_is_right_at_every_depth(depth, windows):
    engine = make_engine(hash_kv(14, 4, windows), depth=depth)
    prompts = {str(i): [7] * (i % 5 * 3) + [i, i + 1] for i in range(12)}
    for rid, prompt in prompts.items():
        engine.add(request(rid, prompt, max_tokens=12))
    events = run(engine)
    for rid, prompt in prompts.items():
        want = expected_tokens(engine.executor.model, prompt, SamplingParams(max_tokens=12, temperature=0.0))
        assert tokens(events[rid]) == want
        assert [e.finish for e in events[rid] if e.finish] == ["length"]
    assert not engine.executor.rows, "rows stay behind"
    assert engine.stats().num_preempted > 0 or windows == (5,)


def test_a_fault_ends_one_request_only():
    engine = make_engine(fault=lambda work: "nan in logits" if work.id == "bad" and work.start > 3 else None)
    for rid in ("a", "bad", "b"):
        engine.add(request(rid, [1, 2, 3]))
    events = run(engine)
    assert events["bad"][-1].finish == "error"
    assert "nan in logits" in events["bad"][-1].error.message
    for rid in ("a", "b"):
        assert events[rid][-1].finish == "length"
        assert len(tokens(events[rid])) == 8


WANTED = {rid: [i] * 9 + list(range(9)) for i, rid in enumerate("abcd")}


def expected(engine: EngineCore, rid: str) -> list[int]:
    return expected_tokens(engine.executor.model, WANTED[rid], SamplingParams(max_tokens=8, temperature=0.0))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_step_that_fails_once_costs_nobody_anything(depth, step):
    def fail(plan):
        if plan.step == step:
            raise RuntimeError("out of memory")

    engine = make_engine(depth=depth, fail=fail)
    for rid, prompt in WANTED.items():
        engine.add(request(rid, prompt))
    events = run(engine)
    for rid in WANTED:
        assert events[rid][-1].finish == "length"
        assert tokens(events[rid]) == expected(engine, rid)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("start", [0, 16, 21])
def test_only_the_row_at_fault_ends(depth, start):
    """Wherever in its prompt or output it fails; the others keep what they had in the prefix cache."""
    failed = []

    def fail(plan):
        if any(row.id == "b" and row.start + row.num_tokens > start for row in plan.rows):
            failed.append(plan)
            raise RuntimeError("out of memory")

    engine = make_engine(kv=hash_kv(100, 4), depth=depth, fail=fail)
    for rid, prompt in WANTED.items():
        engine.add(request(rid, prompt))
    events = run(engine)
    assert events["b"][-1].finish == "error"
    assert "RuntimeError" in events["b"][-1].error.message
    assert "out of memory" not in events["b"][-1].error.message, "the text of the cause is for the log"
    assert tokens(events["b"]) == expected(engine, "b")[: len(tokens(events["b"]))]
    for rid in "acd":
        assert events[rid][-1].finish == "length"
        assert tokens(events[rid]) == expected(engine, rid)
    assert len(failed) == 2, "in company, then alone"
    engine.add(request("again", WANTED["a"]))
    (first, *_), *_ = run(engine).values()
    assert first.num_cached == 16, "what others computed is still found"


def test_steps_that_fail_in_company_only_come_to_an_end():
    """Nobody is at fault, and yet it must not go on for ever."""

    def fail(plan):
        if len(plan.rows) > 1:
            raise RuntimeError("too many rows")

    engine = make_engine(fail=fail)
    for rid, prompt in WANTED.items():
        engine.add(request(rid, prompt, max_tokens=40))
    events = run(engine)
    assert {e[-1].finish for e in events.values()} <= {"error", "length"}
    assert engine.executor.num_steps < 60
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_a_request_that_is_aborted_while_rows_are_tried_leaves_nothing():
    def fail(plan):
        if len(plan.rows) > 1 and plan.step == 3:
            raise RuntimeError("lost")

    engine = make_engine(fail=fail)
    for rid, prompt in WANTED.items():
        engine.add(request(rid, prompt))
    events = [event for _ in range(3) for event in engine.step()]
    engine.abort(["a", "b"])
    events += [event for found in run(engine).values() for event in found]
    for rid in "cd":
        assert [t for e in events if e.id == rid for t in e.tokens] == expected(engine, rid)


def test_workers_that_cannot_forget_rows_lose_the_running_requests():
    def fail(plan):
        if plan.step == 3:
            raise RuntimeError("lost")

    engine = make_engine(limits={"max_rows": 2}, fail=fail)
    control = engine.executor.control
    engine.executor.control = lambda c: [Reply(False, "cannot")] if isinstance(c, ForgetRows) else control(c)
    for rid, prompt in WANTED.items():
        engine.add(request(rid, prompt))
    events = run(engine)
    assert [rid for rid in WANTED if events[rid][-1].finish == "error"] == ["a", "b"]
    assert events["c"][0].num_cached == 0, "the cache was emptied"
    assert tokens(events["c"]) == expected(engine, "c")


def test_a_dead_rank_kills_the_engine():
    engine = make_engine()
    engine.add(request("a", [1]))
    engine.executor.die("signal 9")
    with pytest.raises(EngineDead, match="signal 9"):
        engine.step()


def test_a_failure_during_a_step_kills_the_engine_at_once():
    engine = make_engine()

    def fail(plan):
        engine.executor.die("out of memory")
        raise RuntimeError("lost")

    engine.executor.fail = fail
    engine.add(request("a", [1]))
    with pytest.raises(EngineDead, match="out of memory"):
        engine.step()


def test_workers_that_do_not_recover_kill_the_engine(caplog):
    def fail(plan):
        raise RuntimeError("lost")

    for control, words in (
        (lambda command: [Reply(False, "cannot")], "cannot"),
        (lambda command: 1 / 0, "division"),
    ):
        engine = make_engine(fail=fail)
        engine.executor.control = control
        engine.add(request("a", [1]))
        with pytest.raises(EngineDead, match="did not recover") as caught:
            engine.step()
        assert words in f"{caught.value.__cause__} {caplog.text}"


def test_the_pipe_is_kept_full():
    """With depth 2 the second step is launched before the result of the first is waited for."""
    engine, log = make_engine(depth=2), []
    forward, update = engine.executor.forward, engine.scheduler.update
    engine.executor.forward = lambda plan: (log.append(("forward", plan.step)), forward(plan))
    engine.scheduler.update = lambda plan, result: (log.append(("update", plan.step)), update(plan, result))[1]
    engine.add(request("a", [1], max_tokens=3))
    run(engine)
    assert log[:4] == [("forward", 1), ("forward", 2), ("update", 1), ("forward", 3)]


def test_a_whole_scheduler_that_does_not_deal_out_rows_is_refused_where_several_steps_are_in_flight(monkeypatch):
    choice = Choice("scheduler", "", "mine", "lmkit_testing.stepper:Mine", "mine", "1", "mine.hooks")
    plan, mine = ResolvedPlan(None, (choice,)), type("Mine", (), {"schedule": None, "__init__": lambda *parts: None})
    monkeypatch.setattr("lmkit_testing.stepper.Mine", mine, raising=False)
    limits = SchedLimits(16, 8, 64, depth=2, apart=True)
    with pytest.raises(ConfigError, match="steps in flight the same rows"):
        _scheduler(plan, limits, hash_kv(), None)
    assert isinstance(_scheduler(plan, SchedLimits(16, 8, 64, apart=True), hash_kv(), None), mine)
    mine.apart = True
    assert isinstance(_scheduler(plan, limits, hash_kv(), None), mine)


@pytest.mark.parametrize(("apart", "in_flight"), [(True, 1), (False, 0)])
def test_masks_wait_for_tokens_of_their_own_rows_alone(apart, in_flight):
    seen = []

    class Grammars(NoStructuredOutput):
        def concerns(self, plan):
            return True

        def fill(self, plan):
            seen.append(len(engine.pending))

    engine = make_engine(depth=2, limits={"apart": apart})
    engine = EngineCore(engine.scheduler, engine.executor, engine.intake, Grammars())
    for rid in ("a", "b"):
        engine.add(request(rid, [1, ord(rid) % 3]))
    events = run(engine)
    assert max(seen) == in_flight
    assert all(len(tokens(events[rid])) == 8 for rid in ("a", "b"))


def test_masks_are_filled_between_forward_and_sample():
    log = []

    class Grammars(NoStructuredOutput):
        def fill(self, plan):
            log.append("fill")

    engine = make_engine()
    forward, sample = engine.executor.forward, engine.executor.sample
    engine.executor.forward = lambda plan: (log.append("forward"), forward(plan))
    engine.executor.sample = lambda step, masks: (log.append("sample"), sample(step, masks))[1]
    engine = EngineCore(engine.scheduler, engine.executor, engine.intake, Grammars())
    engine.add(request("a", [1], max_tokens=1))
    engine.step()
    assert log == ["forward", "fill", "sample"]


def test_an_engine_whose_requests_wait_for_gates_says_so():
    class Shut:
        name = "adapter"
        is_open = False

        def ready(self):
            return self.is_open

        def error(self):
            return None

    gate, engine = Shut(), make_engine()
    engine.intake = Intake(97, 64, adapters={"red": lambda: gate})
    waiting = request("a", [1])
    waiting.adapter = "red"
    engine.add(waiting)
    assert engine.step() == []
    assert engine.blocked
    assert engine.executor.num_steps == 0, "workers are not bothered"
    gate.is_open = True
    assert tokens(engine.step())
    assert not engine.blocked
    run(engine)


def test_invariants_are_checked_when_idle(monkeypatch):
    monkeypatch.setattr("lmkit.engine.core.CHECK_INTERVAL", 2)
    engine, checks = make_engine(), []
    monkeypatch.setattr(engine.scheduler, "check", lambda: checks.append(1))
    for rid in "abcd":
        engine.add(request(rid, [1], max_tokens=1))
        while engine.has_work():
            engine.step()
    assert len(checks) == 2


def test_logprobs_and_prompt_logprobs_arrive_with_their_tokens():
    engine = make_engine(limits={"max_tokens": 4})
    prompt = list(range(10, 20))
    engine.add(request("a", prompt, max_tokens=3, logprobs=2, prompt_logprobs=1))
    events = run(engine)["a"]
    assert [len(e.logprobs) for e in events] == [len(e.tokens) for e in events] == [0, 0, 1, 1, 1]
    assert [e.token for event in events for e in event.prompt_logprobs] == prompt[1:]
    assert [e.num_cached for e in events] == [0, None, None, None, None]
    assert all(len(entry.top) == 2 for event in events for entry in event.logprobs)
    assert [entry.token for event in events for entry in event.logprobs] == tokens(events)


def test_a_long_story_keeps_the_engine_as_it_was():
    """Nothing grows with the number of requests served."""
    engine = make_engine(hash_kv(30, 4), depth=2)
    for i in range(300):
        engine.add(request(str(i), [i % 7, i % 5, 3], max_tokens=1 + i % 4))
        if i % 9 == 0:
            engine.abort([str(i)])
        engine.step()
    run(engine)
    s = engine.scheduler
    assert not s.requests
    assert not s.waiting.items
    assert not s.running.items
    assert not engine.executor.rows
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_large_vectors_are_sent_by_themselves() -> None:
    """No frame of the socket grows with the number of requests that end in one step."""
    from lmkit.api import Pooled, TokenEvent
    from lmkit.engine.loop import LARGE, _portions

    small, large = Pooled(b"1234", (1,)), Pooled(bytes(LARGE + 4), (LARGE // 4 + 1,))
    events = [TokenEvent(str(i), pooled=large if i % 2 else small) for i in range(6)]
    portions = list(_portions(events))
    assert sorted(len(part) for part in portions) == [1, 1, 1, 3]
    assert sorted(e.id for part in portions for e in part) == [str(i) for i in range(6)]
    assert list(_portions([])) == []
    assert list(_portions(events[::2])) == [events[::2]]


def test_a_request_that_leaves_no_token_ends_alone_and_the_cache_stays():
    """Its own parameters are at fault, not what the model computed."""
    engine = make_engine(kv=hash_kv(100, 4))
    real = engine.executor.sample

    def sample(step, masks):
        future = real(step, masks)
        result = future.result()
        for i in [i for i, row in enumerate(engine._plan.rows) if row.id == "b"]:
            result.tokens[i] = []
            result.undrawn.append((i, "no token is allowed"))
        return future

    forward = engine.executor.forward

    def noted(plan):
        engine._plan = plan
        forward(plan)

    engine.executor.forward, engine.executor.sample = noted, sample
    for rid, prompt in WANTED.items():
        engine.add(request(rid, prompt))
    events = run(engine)
    error = events["b"][-1].error
    assert (error.code, error.status) == ("invalid-request", 400)
    assert "no token is allowed" in error.message
    for rid in "acd":
        assert tokens(events[rid]) == expected(engine, rid)
    engine.add(request("again", WANTED["a"]))
    (first, *_), *_ = run(engine).values()
    assert first.num_cached == 16


class Unruly(ArrivalOrder):
    """An order that breaks its contract for one request."""

    def __init__(self, which: str, how: object) -> None:
        self.which, self.how = which, how

    def _key(self, which, r, key):
        if which != self.which or r.id != "b":
            return key
        if isinstance(self.how, Exception):
            raise self.how
        return self.how

    def admit_key(self, r):
        return self._key("admit_key", r, super().admit_key(r))

    def victim_key(self, r):
        return self._key("victim_key", r, super().victim_key(r))


@pytest.mark.parametrize("which", ["admit_key", "victim_key"])
@pytest.mark.parametrize(
    "how",
    [ZeroDivisionError("x"), None, 3, ("text",), (None,), (float("nan"),), ([],), (1, 2, 3, 4, 5, 6, 7)],
    ids=repr,
)
def test_a_policy_that_breaks_its_contract_costs_the_request_that_it_was_asked_about(which, how, caplog):
    limits = SchedLimits(max_tokens=16, max_rows=8, max_length=64)
    kv = hash_kv(40, 4)
    executor = HashExecutor(kv)
    engine = EngineCore(Scheduler(limits, kv, Unruly(which, how)), executor, Intake(executor.vocab_size, 64))
    heard: dict[str, list[TokenEvent]] = {}
    for rid in "abc":
        try:
            engine.add(request(rid, WANTED[rid]))
        except PluginError as error:
            assert (rid, which) == ("b", "admit_key")
            heard["b"] = [TokenEvent("b", finish="error", error=error.info())]
    heard |= run(engine)
    error = heard["b"][-1].error
    assert error.code == "plugin"
    assert which in error.message
    assert "Unruly" in error.message
    for rid in "ac":
        assert tokens(heard[rid]) == expected(engine, rid)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
