"""Constrained requests: the thinking before them, drafts, preemption, depth, errors, and the process that compiles."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit.api import Choice, EngineBusy, EngineRequest, Grammar, GrammarError, SamplingParams, SchedLimits, Thinking
from lmkit.engine.core import EngineCore
from lmkit.engine.intake import Intake
from lmkit.scheduling.request import Request
from lmkit.scheduling.scheduler import Scheduler
from lmkit_structured_output_masks.channel import Channel, MarkerTable
from lmkit_structured_output_masks.compiler import CompileLimits, Compiler, Wanted
from lmkit_structured_output_masks.constraint import Constraint
from lmkit_structured_output_masks.output import ConstrainedOutput
from lmkit_testing import StructuredOutputConformance
from lmkit_testing.grammars import Stairs, StairsCompiler, StairsMatcher, byte_vocabulary
from lmkit_testing.hash_model import HashExecutor, hash_kv
from lmkit_testing.stepper import ArrivalOrder


class TestMasks(StructuredOutputConformance):
    plugin = "structured_output:masks"


END = 96  # of the hash-model's vocabulary of 97 ids


def vocabulary():
    """97 ids: bytes 32 to 127 stand for themselves, and the last one ends."""
    from lmkit.api import Vocabulary

    pieces = [bytes([32 + i]) for i in range(96)] + [b"<|end|>"]
    return Vocabulary(pieces, frozenset({END}), (END,), 97)


def make_engine(depth=1, num_blocks=40, at_once=True, num_drafts=0, propose=None, max_rows=8, lookahead=0):
    kv = hash_kv(num_blocks, 4)
    executor = HashExecutor(
        kv, depth=depth, eos_token_ids=(END,), masks_stops=False, num_drafts=num_drafts, propose=propose
    )
    limits = SchedLimits(
        max_tokens=16,
        max_rows=max_rows,
        max_length=64,
        depth=depth,
        eos_token_ids=(END,),
        lookahead=num_drafts or lookahead,
    )
    grammars = ConstrainedOutput(StairsCompiler(vocabulary(), at_once), max_rows if lookahead else 0)
    return EngineCore(Scheduler(limits, kv, ArrivalOrder()), executor, Intake(97, 64, grammars=grammars))


def request(id: str, period: str | None, prompt=(1, 2, 3), **params) -> EngineRequest:
    grammar = Grammar("regex", period) if period else None
    options = {"max_tokens": 12, "temperature": 1.0, "seed": len(id), "grammar": grammar, **params}
    return EngineRequest(id, list(prompt), SamplingParams(**options))


def run(engine: EngineCore, requests=()) -> dict[str, tuple[list[int], object]]:
    """id -> tokens, and the finishing event."""
    waiting = list(requests)
    found: dict[str, tuple[list[int], object]] = {}
    for _ in range(2000):
        if waiting:
            engine.add(waiting.pop())
        for event in engine.step():
            tokens, _ = found.setdefault(event.id, ([], None))
            tokens += event.tokens
            if event.finish:
                found[event.id] = (tokens, event)
        engine.scheduler.check()
        if not waiting and not engine.has_work():
            return found
    raise AssertionError("the engine does not come to an end")


def assert_stairs(tokens: list[int], period: int, finish: str) -> None:
    body = tokens[:-1] if tokens and tokens[-1] == END else tokens
    assert [t % period for t in body] == [i % period for i in range(len(body))], tokens
    assert END not in body
    if finish == "stop":
        assert len(body) % period == 0, "it ended where the grammar was not complete"


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [40, 12])
def test_constrained_and_free_requests_share_steps(depth, num_blocks):
    engine = make_engine(depth, num_blocks)
    periods = {f"r{i:02}": (None, "2", "3", "7")[i % 4] for i in range(16)}
    requests = [
        request(id, p, [7] * (i % 5 * 3) + [i, i + 1], max_tokens=14) for i, (id, p) in enumerate(periods.items())
    ]
    found = run(engine, requests)
    for id, period in periods.items():
        tokens, event = found[id]
        assert event.finish in ("stop", "length")
        if period:
            assert_stairs(tokens, int(period), event.finish)
    assert engine.stats().num_preempted > 0 or num_blocks == 40
    assert not engine.executor.rows
    engine.add(request("z", None))
    engine.step()
    assert not engine.grammars._live, "constraints of finished requests stay behind"


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_drafts_are_verified_against_the_grammar(num_drafts):
    source = random.Random(0)

    def propose(tokens: list[int], k: int) -> list[int]:
        return [source.randrange(97) if source.random() < 0.3 else tokens[-1] + 1 + i for i in range(k)]

    engine = make_engine(num_drafts=num_drafts, propose=lambda t, k: [x % 97 for x in propose(t, k)])
    found = run(engine, [request(f"r{i:02}", "3", [i, 1], max_tokens=20) for i in range(8)])
    for tokens, event in found.values():
        assert_stairs(tokens, 3, event.finish)


@pytest.mark.parametrize(("lookahead", "num_blocks", "max_rows"), [(4, 40, 16), (16, 40, 16), (16, 14, 8), (16, 40, 5)])
def test_tokens_that_must_follow_are_computed_at_once(lookahead, num_blocks, max_rows):
    def answers(lookahead):
        engine = make_engine(num_blocks=num_blocks, max_rows=max_rows, lookahead=lookahead)
        periods = ["70", None, "90", "3"]
        found = run(engine, [request(f"r{i:02}", periods[i % 4], [i, 1], max_tokens=40) for i in range(8)])
        return {id: (tokens, event.finish) for id, (tokens, event) in found.items()}, engine.stats().num_steps

    plain, num_plain = answers(0)
    jumped, num_jumped = answers(lookahead)
    assert jumped == plain
    assert num_jumped < num_plain


def test_others_go_on_while_a_grammar_is_compiled():
    engine = make_engine(at_once=False)
    engine.add(request("slow", "3"))
    engine.add(request("free", None))
    events = [e for _ in range(30) for e in engine.step()]
    assert {e.id for e in events} == {"free"}
    assert engine.blocked
    engine.grammars._compiler.finish()
    assert_stairs(*(lambda t, e: (t, 3, e.finish))(*run(engine)["slow"]))


def test_a_refused_grammar_fails_its_request_only():
    found = run(make_engine(), [request("bad", "x"), request("good", "2")])
    assert (found["bad"][1].finish, found["bad"][1].error.code, found["bad"][1].error.status) == (
        "error",
        "grammar",
        400,
    )
    assert_stairs(found["good"][0], 2, found["good"][1].finish)


def test_a_matcher_that_breaks_fails_its_request_only(monkeypatch):
    class Breaks(StairsMatcher):
        def fill(self, row):
            if self.num == 4:
                raise GrammarError("too much work") if self._grammar.period == 2 else ZeroDivisionError("a bug")
            super().fill(row)

    monkeypatch.setattr(Stairs, "matcher", lambda self: Breaks(self) if self.period < 4 else StairsMatcher(self))
    engine = make_engine()
    found = run(engine, [request("typed", "2"), request("bug", "3"), request("good", "5"), request("free", None)])
    assert found["typed"][1].error.message == "too much work"
    assert (found["bug"][1].error.code, "ZeroDivisionError" in found["bug"][1].error.message) == ("plugin", True)
    assert found["good"][1].finish != "error"
    assert found["free"][1].finish != "error"
    assert not engine.executor.rows
    assert not engine.scheduler.requests


def test_a_grammar_that_does_harm_in_use_ends_its_request_only(monkeypatch):
    def matcher(grammar):
        return {2: Slow, 4: Stuck}.get(grammar.period, StairsMatcher)(grammar)

    monkeypatch.setattr(Stairs, "matcher", matcher)
    engine = make_engine()
    found = run(engine, [request("slow", "2"), request("stuck", "4"), request("good", "5"), request("free", None)])
    assert (found["slow"][1].error.code, found["slow"][1].error.status) == ("grammar", 400)
    assert "takes more than" in found["slow"][1].error.message
    assert (found["stuck"][1].error.code, found["stuck"][1].error.status) == ("grammar", 400)
    assert "nothing may follow" in found["stuck"][1].error.message
    assert found["good"][1].finish != "error"
    assert found["free"][1].finish != "error"
    assert not engine.executor.rows


class Panic(BaseException):
    """As a library in Rust throws it."""


def test_a_panic_of_a_library_ends_its_request_only(monkeypatch):
    class Panics(StairsMatcher):
        def fill(self, row):
            raise Panic

    def matcher(grammar):
        if grammar.period == 3:
            raise Panic
        return Panics(grammar) if grammar.period == 2 else StairsMatcher(grammar)

    monkeypatch.setattr(Stairs, "matcher", matcher)
    found = run(make_engine(), [request("mask", "2"), request("start", "3"), request("good", "5")])
    assert (found["mask"][1].error.code, found["start"][1].error.code) == ("plugin", "plugin")
    assert found["good"][1].finish != "error"


def test_grammars_in_use_share_a_bounded_memory(monkeypatch):
    monkeypatch.setattr(Stairs, "nbytes", 1000)
    engine = make_engine()
    output = engine.grammars
    output._compiler.limits = CompileLimits(live_bytes=5000)
    seen, fill = [], output.fill
    output.fill = lambda plan: seen.append(len(output._live)) or fill(plan)
    found = run(engine, [request("r" * (1 + i), str(2 + i)) for i in range(6)])
    assert {event.finish for _, event in found.values()} <= {"stop", "length"}
    assert max(seen) == 2, "each takes 2025 bytes"
    assert not output._live
    assert not output._used
    assert not output._waiting


def test_a_request_that_is_aborted_waits_for_its_grammar_no_longer():
    engine = make_engine(at_once=False)
    engine.add(request("a", "3"))
    engine.step()
    (compilation,) = engine.grammars._waiting.values()
    engine.abort(["a"])
    assert compilation.done
    assert not engine.grammars._waiting
    assert not engine.has_work()


def test_without_an_end_token_there_is_no_grammar():
    from dataclasses import replace

    compiler = StairsCompiler(replace(vocabulary(), eos_token_ids=()))
    assert "end token" in compiler.submit(Wanted(Grammar("regex", "2"), None, ())).error.message
    assert compiler.submit(Wanted(Grammar("regex", "2"), None, (END,))).ends == (END,)


# --------------------------------------------------------------------------------------------------- thinking

VOCAB = byte_vocabulary("<|end|>", "<think>", extra=[b"</", b"think>", b">\n\n", b">{", b"</think>", b"<call>"])
ENDS = (262,)
MARKS = Thinking(close=("</think>",), open=("<think>",), until=("<call>",))


def tokens_of(mask: np.ndarray) -> set[bytes]:
    ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return {VOCAB.pieces[i] for i in ids if i < len(VOCAB.pieces)}


@pytest.fixture(scope="module")
def table() -> MarkerTable:
    return MarkerTable(MARKS, VOCAB, ENDS)


def channel(table: MarkerTable, **changes) -> Channel:
    from dataclasses import replace

    return Channel(table, replace(MARKS, **changes))


def feed(at: Channel, *pieces: bytes) -> list[bool]:
    return [at.feed(VOCAB.pieces.index(p)) for p in pieces]


def test_the_body_begins_after_the_marker_however_it_is_spelt(table):
    for spelling in (
        [b"</think>"],
        [b"</", b"think>"],
        [bytes([c]) for c in b"</think>"],
        [b"</", *map(bytes, zip(b"think")), b">\n\n"],
    ):
        at = channel(table, inside=True)
        assert feed(at, b"a", b"<", *spelling) == [False] * (2 + len(spelling))
        assert at.phase == "body"
        assert feed(at, b"</think>") == [True]


def test_inside_the_thinking_ends_and_false_ends_are_not_allowed(table):
    at = channel(table, inside=True)
    allowed = tokens_of(at.mask())
    assert {b"a", b"</", b"</think>", b">{", b"<think>"} <= allowed
    assert not {b"<|end|>", b"<call>"} & allowed
    feed(at, b"</", *map(bytes, zip(b"think")))
    assert {b">", b">\n\n", b"x"} <= tokens_of(at.mask())
    assert b">{" not in tokens_of(at.mask()), "text behind the marker would escape the grammar"
    feed(at, b"x", b"<", *map(bytes, zip(b"call")))
    assert not {b">", b">\n\n", b">{"} & tokens_of(at.mask())


def test_a_budget_forces_the_end(table):
    at = channel(table, inside=True, budget=2)
    feed(at, b"a")
    assert not at.spent
    feed(at, b"</")
    assert at.spent
    assert tokens_of(at.mask()) == {b"think>"}
    feed(at, b"think>")
    assert at.phase == "body"


def test_an_output_may_open_its_thinking_or_not(table):
    at = channel(table)
    assert {b"<think>", b"<"} <= tokens_of(at.opening())
    assert feed(at, b"<think>") == [False]
    assert at.phase == "thinking"
    at = channel(table)
    assert feed(at, b"<", b"t") == [False, False]
    assert tokens_of(at.mask()) == {b"h"}
    at = channel(table)
    assert feed(at, b"a") == [True]
    assert at.phase == "body"


@settings(deadline=None)
@given(st.lists(st.integers(0, 263), max_size=30), st.integers(0, 30))
def test_going_back_is_as_if_it_had_not_been(ids, at):
    straight, other = channel(_TABLE, inside=True), channel(_TABLE, inside=True)
    for token in ids[:at]:
        straight.feed(token)
        other.feed(token)
    state = other.state
    for token in ids[at:]:
        other.feed(token)
    other.restore(state)
    assert other.state == straight.state


@settings(deadline=None)
@given(st.randoms(use_true_random=False))
def test_what_the_masks_allow_is_thinking_and_then_the_grammar(source):
    """A sampler that takes any allowed token: the text is THINKING </think> BODY, and BODY has the right steps."""
    table = _TABLE
    r = Request("a", SamplingParams(), 1, [0])
    at = channel(table, inside=source.random() < 0.5, budget=source.choice([None, 0, 5]))
    constraint = Constraint(r, Stairs(VOCAB.size, 3).matcher(), at, ENDS, VOCAB.size)
    for _ in range(40):
        drafts = [source.randrange(264) for _ in range(source.choice([0, 0, 2]))]
        masks = constraint.masks(drafts)
        assert len(masks) == len(drafts) + 1
        mask = masks[0]
        ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        close = [i for i in ids if VOCAB.pieces[i] in (b"</think>", b"</", b"think>")]
        token = int(source.choice(close if close and source.random() < 0.3 else ids.tolist()))
        r.tokens.append(token)
        if token in ENDS:
            break
    text = b"".join(VOCAB.pieces[t] for t in r.tokens[1:] if t not in ENDS)
    assert b"<call>" not in text.partition(b"</think>")[0] or constraint._channel.phase == "body"
    if constraint._channel.phase == "body":
        assert r.tokens[-1] in ENDS or len(r.tokens) == 41


@settings(deadline=None)
@given(st.randoms(use_true_random=False))
def test_masks_of_a_tree_are_those_of_its_paths(source):
    """Drafts that branch are masked as if each path were all there is, and leave no trace."""
    r = Request("a", SamplingParams(), 1, [0])
    at = channel(_TABLE, inside=source.random() < 0.5, budget=source.choice([None, 0, 5]))
    constraint = Constraint(r, Stairs(VOCAB.size, 3).matcher(), at, ENDS, VOCAB.size)

    def likely(mask):
        ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")) if mask is not None else [0]
        return int(source.choice(list(ids))) if source.random() < 0.8 else source.randrange(264)

    for _ in range(6):
        drafts, parents, paths = [], [], [[]]
        for i in range(source.randint(1, 8)):
            parents.append(source.randint(-1, i - 1))
            drafts.append(likely(constraint.masks(paths[parents[-1] + 1])[-1]))
            paths.append([*paths[parents[-1] + 1], drafts[-1]])
        found = constraint.masks(drafts, parents)
        assert len(found) == len(paths)
        for mask, path in zip(found, paths, strict=True):
            wanted = constraint.masks(path)[-1]
            assert (mask is None) == (wanted is None)
            assert mask is None or (mask == wanted).all()
        r.tokens.append(int(np.flatnonzero(np.unpackbits(found[0].view(np.uint8), bitorder="little"))[0]))
        if r.tokens[-1] in ENDS:
            break


_TABLE = MarkerTable(MARKS, VOCAB, ENDS)


def test_end_ids_wait_for_the_grammar():
    r = Request("a", SamplingParams(), 1, [0])
    constraint = Constraint(r, Stairs(VOCAB.size, 2).matcher(), None, ENDS, VOCAB.size)
    seen = []
    for token in (2, 3, 4, 5):
        seen.append(b"<|end|>" in tokens_of(constraint.masks([])[0]))
        r.tokens.append(token)
    assert seen == [True, False, True, False]
    r.tokens[-1] = 4
    with pytest.raises(GrammarError, match="does not fit"):
        constraint.masks([])


# -------------------------------------------------------------------------------------------------- compiling


class Scripted:
    """A backend whose grammars say what compiling does."""

    kinds = frozenset({"regex", "lark"})

    def __init__(self, vocabulary) -> None:
        self.vocabulary = vocabulary

    def compile(self, grammar):
        if grammar.source == "spin":
            while True:
                pass
        if grammar.source == "eat":
            return bytes(bytearray(1 << 34))
        if grammar.source == "print":
            print("noise on stdout")
        if grammar.source == "bug":
            raise ZeroDivisionError
        if not grammar.source.isdigit() and grammar.source not in ("print", "keep", "slow", "stuck", "breaks"):
            raise GrammarError(f"refused {grammar.source}")
        return grammar.source.encode()

    def load(self, compiled):
        grammar = Stairs(self.vocabulary.size, int(compiled) if compiled.isdigit() else 2)
        grammar.matcher = lambda: {"slow": Slow, "stuck": Stuck, "breaks": Breaks}.get(
            compiled.decode(), StairsMatcher
        )(grammar)
        if compiled == b"keep":
            grammar.kept = bytearray(os.urandom(1)) * (100 << 20)
        return grammar


class Slow(StairsMatcher):
    def fill(self, row):
        end = time.thread_time() + 0.6
        while time.thread_time() < end:
            pass
        super().fill(row)


class Stuck(StairsMatcher):
    def fill(self, row):
        if self.num != 3:
            super().fill(row)


class Breaks(StairsMatcher):
    def accept(self, ids):
        if self.num == 3:
            raise GrammarError("too complex")
        return super().accept(ids)


class Other(Scripted):
    kinds = frozenset({"lark", "choice"})

    def compile(self, grammar):
        return b"5"


def scripted_compiler(**limits) -> Compiler:
    choices = [
        Choice("grammar", "grammar", name, f"{Path(__file__).stem}:{target}", "x", "1", "x")
        for name, target in (("first", "Scripted"), ("second", "Other"))
    ]
    return Compiler(choices, vocabulary, CompileLimits(**{"cpu_seconds": 1, "nbytes": 1 << 28, **limits}))


def wait(compiler: Compiler, *grammars: Grammar) -> list:
    found = [compiler.submit(Wanted(g, None, ())) for g in grammars]
    end = time.monotonic() + 60
    while not all(c.done for c in found):
        assert time.monotonic() < end, "not compiled within a minute"
        time.sleep(0.005)
    return found


@pytest.fixture(scope="module", autouse=True)
def findable():
    """This module can be imported by name, here and in the process that compiles."""
    folder, before = os.path.dirname(__file__), os.environ.get("PYTHONPATH")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", folder + (os.pathsep + before if before else ""))
        patch.syspath_prepend(folder)
        yield


@pytest.fixture(scope="module")
def compiler(findable):
    made = scripted_compiler()
    yield made
    made.close()


def test_the_process_is_killed_when_it_takes_too_much(compiler):
    spin, eat, fine, refused = wait(compiler, *(Grammar("regex", s) for s in ("spin", "eat", "3", "no")))
    assert "1 s of CPU time" in spin.error.message
    assert spin.error.status == 400
    assert "256 MiB of memory" in eat.error.message
    assert fine.error is None
    assert fine.compiled.period == 3
    assert refused.error.message == "the grammar is refused: refused no"


def test_answers_are_cached_failures_too(compiler):
    first = wait(compiler, Grammar("regex", "spin"), Grammar("regex", "4"))
    again = wait(compiler, Grammar("regex", "spin"), Grammar("regex", "4"))
    assert all(one is other for one, other in zip(again, first, strict=True))  # nothing was compiled


def test_what_a_library_prints_does_not_disturb(compiler):
    (found,) = wait(compiler, Grammar("regex", "print"))
    assert found.error is None


def test_the_next_backend_is_asked_and_an_explicit_one_only(compiler):
    both, second, only, none = wait(
        compiler,
        Grammar("lark", "no"),
        Grammar("choice", "x"),
        Grammar("lark", "no", "first"),
        Grammar("lark", "1", "third"),
    )
    assert both.compiled.period == second.compiled.period == 5
    assert only.error.message == "the grammar is refused: refused no"
    assert "no grammar backend 'third'" in none.error.message
    assert "first, second" in none.error.message
    (neither,) = wait(compiler, Grammar("ebnf", "x"))
    assert neither.error.message == "no grammar backend here takes 'ebnf' (asked: first, second)"


def test_a_bug_of_a_backend_is_an_error_that_is_not_kept(compiler):
    (first,) = wait(compiler, Grammar("regex", "bug"))
    (second,) = wait(compiler, Grammar("regex", "bug"))
    assert first.error is not None
    assert first is not second


def test_the_cache_and_the_queue_are_bounded(compiler):
    real = scripted_compiler(max_waiting=2, cache_bytes=5000)
    found = [wait(real, Grammar("regex", str(i)))[0] for i in range(2, 9)]
    real.close()
    assert sum(c.nbytes for c in real._known.values()) == real._nbytes
    assert real._nbytes <= 5000 or len(real._known) == 1
    assert list(real._known)[-1] == found[-1].wanted
    real._thread = real  # nothing is taken out of the queue any more
    real.submit(Wanted(Grammar("regex", "20"), None, ()))
    waiting = real.submit(Wanted(Grammar("regex", "21"), None, ()))
    with pytest.raises(EngineBusy):
        real.submit(Wanted(Grammar("regex", "22"), None, ()))
    real.withdraw(waiting)
    real.submit(Wanted(Grammar("regex", "22"), None, ()))


def test_new_grammars_do_not_wait_for_slow_ones(compiler):
    slow = [compiler.submit(Wanted(Grammar("regex", "spin", "first"), None, (i,))) for i in range(6)]
    (quick,) = wait(compiler, Grammar("regex", "9"))
    assert quick.error is None
    assert sum(c.done for c in slow) <= 3, "one after the other, each would have had its second"
    for compilation in slow:
        compiler.withdraw(compilation)


def test_what_nobody_waits_for_is_not_compiled(compiler):
    both = Wanted(Grammar("regex", "spin", "first"), None, (7,))
    assert compiler.submit(both) is compiler.submit(both)
    waiting = compiler.submit(both)
    for _ in range(3):
        assert compiler.submit(both) is waiting
        compiler.withdraw(waiting)
    for _ in range(3):
        assert not waiting.done
        compiler.withdraw(waiting)
    assert waiting.done
    again = compiler.submit(both)
    assert again is not waiting
    compiler.withdraw(again)
    (fine,) = wait(compiler, Grammar("regex", "8"))
    assert fine.error is None
    assert compiler._num_waiting == 0
    assert not compiler._jobs


@pytest.mark.full
def test_a_compiled_grammar_that_takes_too_much_is_refused(compiler):
    keep, slow, stuck, breaks = wait(compiler, *(Grammar("regex", s) for s in ("keep", "slow", "stuck", "breaks")))
    assert "64 MiB are possible" in keep.error.message
    assert "a step of it takes more than" in slow.error.message
    assert "nothing may follow" in stuck.error.message
    assert "too complex" in breaks.error.message
    assert {e.error.status for e in (keep, slow, stuck, breaks)} == {400}
