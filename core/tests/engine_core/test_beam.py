"""Beam search on the hash-model: what is found is what a search without blocks, batches and caches finds."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from lmkit.api import Beams, EngineRequest, InvalidParam, RequestError, SamplingParams, SchedLimits, TokenEvent
from lmkit.engine.beam import BeamCore
from lmkit.engine.core import EngineCore
from lmkit.engine.intake import Intake
from lmkit.scheduling.scheduler import Scheduler
from lmkit_testing.hash_model import RECURRENT, HashExecutor, HashModel, expected_tokens, hash_kv
from lmkit_testing.stepper import ArrivalOrder

EOS = 5
PLAIN = SamplingParams(max_tokens=9, temperature=0.0)


def make_engine(kv=None, *, depth=1, rows=8, prefix_cache=True, tokens=16, **options) -> BeamCore:
    kv = kv or hash_kv(60, 4)
    executor = HashExecutor(kv, depth=depth, eos_token_ids=(EOS,), **options)
    limits = SchedLimits(tokens, rows, 48, (EOS,), prefix_cache, depth=depth)
    scheduler = Scheduler(limits, kv, ArrivalOrder())
    return BeamCore(scheduler, executor, Intake(executor.vocab_size, 48), eos_token_ids=(EOS,))


def run(engine: BeamCore, computed: list[int] | None = None) -> dict[str, list[TokenEvent]]:
    events: dict[str, list[TokenEvent]] = {}
    real = engine.executor.forward

    def forward(plan):
        if computed is not None:
            computed.extend(row.num_tokens for row in plan.rows)
        real(plan)

    engine.executor.forward = forward
    for _ in range(4000):
        if not engine.has_work():
            engine.executor.forward = real
            left = [engine._searches, engine._owners, engine.executor.rows]
            assert not any(left), "something stays behind"
            return events
        for event in engine.step():
            events.setdefault(event.id, []).append(event)
        engine.scheduler.check()
    raise AssertionError("the engine does not come to an end")


def outputs(events: Sequence[TokenEvent]) -> list[list[int]]:
    (event,) = events
    return [one.tokens for one in (event, *event.others)]


def searched(
    model: HashModel, prompt: list[int], beams: Beams, params: SamplingParams, begun: list[int] | None = None
) -> list[list[int]]:
    """The same search, in a few lines and slowly. `begun`: how many beams of each step are not the likeliest
    continuation of another."""
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else model.eos_token_ids)}
    running, finished = [(0.0, [])], []
    for length in range(1, params.max_tokens + 1):
        found, drawn = [], {}
        for score, text in running:
            (token,) = expected_tokens(model, [*prompt, *text], SamplingParams(max_tokens=1, temperature=0.0))
            drawn[tuple(text)] = token
            place = len(prompt) + len(text)
            top = model.logprob(token, place, beams.width + len(ends)).top
            found += [(score + logprob, [*text, t]) for t, logprob in top]
        found.sort(key=lambda one: -one[0])
        over = length == params.max_tokens
        new = [(s / length**beams.length_penalty, t) for s, t in found[: beams.width] if over or t[-1] in ends]
        finished = sorted(finished + new, key=lambda one: -one[0])[: beams.width]
        running = [one for one in found if one[1][-1] not in ends][: beams.width]
        if begun is not None:
            begun.append(sum(text[-1] != drawn[tuple(text[:-1])] for _, text in running))
        if len(finished) == beams.width:
            far = params.max_tokens if beams.early_stopping == "never" and beams.length_penalty > 0 else length
            best = running[0][0] / far**beams.length_penalty
            if beams.early_stopping is True or best <= finished[-1][0]:
                break
    return [text for _, text in finished[: beams.n]]


def draw_beams(rng: random.Random) -> Beams:
    width = rng.randint(1, 5)
    penalty = rng.choice([0.0, 1.0, -0.5, 2.0])
    return Beams(width, rng.randint(1, width), penalty, rng.choice([True, False, "never"]))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(60))
def test_what_is_found_depends_on_no_engine(seed):
    """Depths, windows, recurrent states, few blocks, few rows, small steps, no prefix cache; others beside it."""
    rng = random.Random(seed)
    windows = rng.choice([(None,), (5,), (None, 6), (None, RECURRENT), (3, None, 9)])
    size = rng.choice([1, 2, 4, 8])
    blocks = [-(-48 // size) * rng.choice([1, 2, 6]) + 2 if w != RECURRENT else rng.choice([2, 6, 30]) for w in windows]
    engine = make_engine(
        hash_kv(blocks, size, windows),
        depth=rng.choice([1, 2, 3]), rows=rng.choice([1, 3, 16]), prefix_cache=rng.random() < 0.8,
        tokens=rng.choice([1, 7, 64]),
    )  # fmt: skip
    asked = {}
    for i in range(rng.randint(1, 4)):
        prompt = [rng.randrange(97) for _ in range(rng.randint(1, 30))]
        stops = tuple(rng.sample(range(97), rng.choice([0, 3])))
        params = SamplingParams(
            max_tokens=rng.randint(1, 15), temperature=0.0, ignore_eos=rng.random() < 0.3, stop_token_ids=stops
        )
        asked[str(i)] = EngineRequest(str(i), prompt, params, beams=draw_beams(rng) if rng.random() < 0.8 else None)
        engine.add(asked[str(i)])
        for _ in range(rng.randrange(4)):
            engine.step()
    for request in asked.values():
        request.id += "again"
        engine.add(request)
    events = run(engine)
    for rid, request in asked.items():
        model = engine.executor.model
        if request.beams is None:
            want = [expected_tokens(model, request.token_ids, request.params)]
            got = [[token for event in events[rid + "again"] for token in event.tokens]]
        else:
            want = searched(model, request.token_ids, request.beams, request.params)
            got = outputs(events[rid + "again"])
        assert got == want
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


@pytest.mark.parametrize("windows", [(None,), (None, 6), (None, RECURRENT)])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_beam_computes_one_position_a_step(windows, depth):
    """Also where the block that it goes on with is partly filled; the prompt is computed once."""
    blocks = [60 for _ in windows]
    engine, computed = make_engine(hash_kv(blocks, 4, windows), depth=depth, tokens=64), []
    prompt = list(range(10, 27))
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    engine.add(EngineRequest("a", prompt, params, beams=Beams(4)))
    run(engine, computed)
    assert sum(computed) == len(prompt) + 4 * 19
    assert sum(n > 1 for n in computed) <= 2, "the prompt, in a part more where its state is kept"


@pytest.mark.parametrize("depth", [1, 2])
def test_the_likeliest_continuation_keeps_its_row(depth):
    engine, new = make_engine(hash_kv(60, 4), depth=depth, tokens=64), []
    real = engine.executor.forward
    engine.executor.forward = lambda plan: (new.extend(plan.new), real(plan))
    request = EngineRequest(
        "a", [*range(10, 27)], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True), beams=Beams(4)
    )
    engine.add(request)
    begun, events = [], run(engine)
    assert outputs(events["a"]) == searched(
        engine.executor.model, request.token_ids, request.beams, request.params, begun
    )
    assert len(new) == 1 + sum(begun[:-1]), "the prompt, and those that begin with another's blocks"
    assert all(row.num_computed == len(row.tokens) - 1 for row in new[1:])
    assert 0 < len(new) < 4 * 19


def test_beams_that_rest_make_room_for_one_that_waits():
    """Two rows for four beams: who has its token gives its row to the next, and most blocks are found again: not those
    that were written on before the beam came that begins with them."""
    engine, computed = make_engine(hash_kv(60, 4), rows=2, tokens=64), []
    request = EngineRequest(
        "a", [*range(10, 27)], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True), beams=Beams(4)
    )
    engine.add(request)
    events = run(engine, computed)
    assert outputs(events["a"]) == searched(engine.executor.model, request.token_ids, request.beams, request.params)
    assert sum(computed) < 17 + 4 * 19 + 8


def test_logprobs_and_ends_are_told():
    engine = make_engine()
    params = SamplingParams(max_tokens=9, temperature=0.0, logprobs=2)
    engine.add(EngineRequest("a", [1, 2, 3], params, beams=Beams(4, 4)))
    ((event,),) = run(engine).values()
    for one in (event, *event.others):
        assert [entry.token for entry in one.logprobs] == one.tokens
        assert all(len(entry.top) == 2 and entry.logprob == -0.5 * entry.rank for entry in one.logprobs)
        assert one.finish == ("stop" if one.tokens[-1] == EOS else "length")
        assert one.stop_token == (EOS if one.tokens[-1] == EOS else None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.5), ("top_p", 0.9), ("top_k", 5), ("min_p", 0.1), ("presence_penalty", 1.0),
        ("repetition_penalty", 1.1), ("min_tokens", 2), ("stop", ("x",)), ("prompt_logprobs", 1),
        ("logit_bias", ((1, 2.0),)), ("extra", {"dry": {}}),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_by_name(field, value):
    engine = make_engine()
    params = SamplingParams(**{"max_tokens": 4, "temperature": 0.0, field: value})
    with pytest.raises(InvalidParam) as e:
        engine.add(EngineRequest("a", [1], params, beams=Beams(2)))
    assert e.value.field == field
    assert not engine.has_work()


def test_too_wide_or_too_long_is_refused_at_once():
    engine = make_engine()
    with pytest.raises(InvalidParam, match="at most 19"):
        engine.add(EngineRequest("a", [1], PLAIN, beams=Beams(20)))
    with pytest.raises(RequestError):
        engine.add(EngineRequest("a", [1] * 40, PLAIN, beams=Beams(2)))
    with pytest.raises(InvalidParam):
        Beams(0)
    with pytest.raises(InvalidParam):
        Beams(2, 3)
    with pytest.raises(InvalidParam):
        Beams(2, early_stopping="sometimes")
    assert not engine.has_work()
    engine.add(EngineRequest("a", [1], PLAIN, beams=Beams(2)))
    with pytest.raises(InvalidParam):
        engine.add(EngineRequest("a", [1], PLAIN, beams=Beams(2)))


def test_an_engine_without_search_refuses_it():
    engine = make_engine()
    plain = EngineCore(engine.scheduler, engine.executor, engine.intake)
    with pytest.raises(InvalidParam):
        plain.add(EngineRequest("a", [1], PLAIN, beams=Beams(2)))


@pytest.mark.parametrize("steps", range(6))
def test_an_aborted_search_leaves_nothing(steps):
    engine = make_engine(depth=1 + steps % 2)
    engine.add(EngineRequest("a", list(range(9)), PLAIN, beams=Beams(3)))
    engine.add(EngineRequest("b", list(range(9)), PLAIN, beams=Beams(3)))
    for _ in range(steps):
        engine.step()
    engine.abort(["a", "a", "unknown"])
    events = run(engine)
    assert list(events) == ["b"]
    assert outputs(events["b"]) == searched(engine.executor.model, list(range(9)), Beams(3), PLAIN)


def test_a_fault_of_one_beam_ends_its_search_only():
    """With one event; what others search is found."""
    engine = make_engine(fault=lambda work: "nan in logits" if work.id.startswith("bad/") and work.start > 5 else None)
    for rid in ("bad", "b"):
        engine.add(EngineRequest(rid, [1, 2, 3], PLAIN, beams=Beams(3)))
    events = run(engine)
    (event,) = events["bad"]
    assert event.finish == "error"
    assert "nan in logits" in event.error.message
    assert outputs(events["b"]) == searched(engine.executor.model, [1, 2, 3], Beams(3), PLAIN)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_fails_costs_time_only(depth):
    def fail(plan):
        if plan.step == 4:
            raise RuntimeError("out of memory")

    engine = make_engine(depth=depth, fail=fail)
    engine.add(EngineRequest("a", [1, 2, 3], PLAIN, beams=Beams(3, 3)))
    assert outputs(run(engine)["a"]) == searched(engine.executor.model, [1, 2, 3], Beams(3, 3), PLAIN)
