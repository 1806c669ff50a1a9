"""The step loop: same text at every depth, faults stay with their request, failed steps and dead ranks."""

from __future__ import annotations

import pytest
from lmkit.api import EngineDead, EngineRequest, SamplingParams, SchedLimits, TokenEvent
from lmkit.engine.core import EngineCore
from lmkit.engine.intake import Intake
from lmkit.scheduling.scheduler import Scheduler
from lmkit.testing.hash_model import HashExecutor, expected_tokens, hash_kv
from lmkit.testing.stepper import ArrivalOrder


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


def test_a_failed_step_fails_running_requests_and_spares_waiting_ones():
    def fail(plan):
        if plan.step == 3:
            raise RuntimeError("out of memory")

    engine = make_engine(limits={"max_rows": 2}, fail=fail)
    prompt = list(range(9))
    for rid in ("a", "b", "c"):
        engine.add(request(rid, prompt))
    events = run(engine)
    for rid in ("a", "b"):
        assert events[rid][-1].finish == "error"
        assert "out of memory" in events[rid][-1].error.message
    assert events["c"][0].num_cached == 0, "the cache was emptied"
    want = expected_tokens(engine.executor.model, prompt, SamplingParams(max_tokens=8, temperature=0.0))
    assert tokens(events["c"]) == want


def test_a_dead_rank_kills_the_engine():
    engine = make_engine()
    engine.add(request("a", [1]))
    engine.executor.die("signal 9")
    with pytest.raises(EngineDead, match="signal 9"):
        engine.step()
