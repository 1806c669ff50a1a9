"""Pauses, sleep and new weights: in any order, with requests in flight, every token is of the weights in force."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lmkit.api import (
    Beams,
    CheckpointError,
    ConfigError,
    Control,
    EngineDead,
    EngineRequest,
    Reply,
    SamplingParams,
    SchedLimits,
    Sleep,
    StepPlan,
    TokenEvent,
    Wake,
)
from lmkit.checkpoint import stamp_of
from lmkit.engine.beam import BeamCore
from lmkit.engine.intake import Intake
from lmkit.engine.messages import Act, ForgetPrefixes, Pause, Resume, UpdateWeights
from lmkit.scheduling.scheduler import Scheduler
from lmkit_testing.hash_model import HashExecutor, HashModel, expected_tokens, hash_kv
from lmkit_testing.stepper import ArrivalOrder

ENOUGH = 600  # steps


def make_core(depth: int = 1, windows: tuple[int | None, ...] = (None,), num_blocks: int = 14) -> BeamCore:
    kv = hash_kv(num_blocks, 4, windows)
    executor = HashExecutor(kv, depth=depth)
    limits = SchedLimits(max_tokens=16, max_rows=8, max_length=40, depth=depth)
    return Strict(Scheduler(limits, kv, ArrivalOrder()), executor, Intake(executor.vocab_size, 40))


class Strict(BeamCore):
    """No step fails: rows of which workers know nothing are not computed again without a word."""

    def _step_failed(self, plan: StepPlan, error: Exception) -> list[TokenEvent]:
        raise error


def request(id: str, prompt: list[int], max_tokens: int = 8, adapter: str | None = None) -> EngineRequest:
    return EngineRequest(id, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0), adapter=adapter)


def until_settled(core: BeamCore) -> list[TokenEvent]:
    """The events of the steps until what was asked for is so."""
    events = []
    for _ in range(ENOUGH):
        if core.life.settled:
            return events
        assert core.has_work(), "nobody would make it so"
        events += core.step()
    raise AssertionError(f"for ever {core.life.state}")


def update(path: Path, text: str) -> UpdateWeights:
    path.write_text(text)
    return UpdateWeights(str(path), stamp_of(path))


class Commands(RuleBasedStateMachine):
    """Whatever is asked of the engine, in whatever order."""

    folder: Path

    @initialize(depth=st.integers(1, 3), windows=st.sampled_from([(None,), (5,), (None, 6)]))
    def start(self, depth: int, windows: tuple[int | None, ...]) -> None:
        self.core = make_core(depth, windows)
        self.texts: dict[str, list[int]] = {}  # prompt and output so far, of each request
        self.left: dict[str, int] = {}  # tokens to come, of those that have not ended
        self.kept: set[str] = set()  # those that are to end before the pause
        self.num = 0

    @property
    def life(self) -> str:
        return self.core.life.state

    def apply(self, act: Act, allowed: bool) -> None:
        if allowed:
            self.core.life.apply(act)
        else:
            with pytest.raises(ConfigError):
                self.core.life.apply(act)

    def see(self, events: list[TokenEvent]) -> None:
        model: HashModel = self.core.executor.model
        for event in events:
            text = self.texts[event.id]
            for token in event.tokens:
                assert [token] == expected_tokens(model, text, SamplingParams(max_tokens=1, temperature=0.0))
                text.append(token)
            self.left[event.id] -= len(event.tokens)
            assert (event.finish == "length") == (self.left[event.id] == 0)
            if event.finish:
                del self.left[event.id]
                self.kept.discard(event.id)

    @rule(prompt=st.lists(st.integers(0, 3), min_size=1, max_size=14), max_tokens=st.integers(1, 12))
    def ask(self, prompt: list[int], max_tokens: int) -> None:
        self.num += 1
        id = f"r{self.num}"
        self.core.add(request(id, prompt, max_tokens))
        self.texts[id], self.left[id] = list(prompt), max_tokens

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.left)))
        self.core.abort([id])
        del self.left[id]
        self.kept.discard(id)

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            if self.core.has_work():
                self.see(self.core.step())

    @rule(finish=st.booleans())
    def pause(self, finish: bool) -> None:
        if self.life == "running" and finish:
            self.kept = set(self.left)
        self.apply(Pause(finish), True)
        if not finish:
            self.kept.clear()

    @rule()
    def settle(self) -> None:
        self.see(until_settled(self.core))

    @precondition(lambda self: self.life == "finishing")
    @rule(prompt=st.lists(st.integers(0, 3), min_size=1, max_size=4))
    def ask_late(self, prompt: list[int]) -> None:
        self.ask(prompt, 4)

    @rule()
    def resume(self) -> None:
        self.apply(Resume(), self.life != "asleep")
        if self.life != "asleep":
            self.kept.clear()

    @rule(level=st.integers(1, 2))
    def sleep(self, level: int) -> None:
        self.apply(Sleep(level), self.life == "paused")

    @rule()
    def wake(self) -> None:
        self.apply(Wake(), self.life == "asleep")

    @rule(text=st.sampled_from("abc"))
    def update(self, text: str) -> None:
        self.apply(update(self.folder / "weights", text), self.life == "paused")

    @rule(text=st.sampled_from("abc"))
    def changed_meanwhile(self, text: str) -> None:
        """All or nothing: then nothing."""
        if self.life == "paused":
            model = self.core.executor.model
            late = replace_stamp(update(self.folder / "weights", text))
            with pytest.raises(CheckpointError, match="has changed"):
                self.core.life.apply(late)
            assert self.core.executor.model == model

    @rule()
    def forget(self) -> None:
        self.apply(ForgetPrefixes(), True)

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "core"):
            self.core.scheduler.check()
            if self.life in ("paused", "asleep"):
                assert not self.core.pending
                assert not self.kept, "a pause that was to wait for these"
                assert not self.core.has_work()

    def teardown(self) -> None:
        """Awake again, everybody gets the rest."""
        if not hasattr(self, "core"):
            return
        if self.life == "asleep":
            self.core.life.apply(Wake())
        self.core.life.apply(Resume())
        for _ in range(ENOUGH):
            if not self.core.has_work():
                break
            self.see(self.core.step())
        assert not self.core.life.late
        assert not self.left, "for ever unfinished"
        stats = self.core.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert not self.core.executor.rows


def replace_stamp(act: UpdateWeights) -> UpdateWeights:
    return UpdateWeights(act.path, act.stamp + " of before")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path) -> None:
    Commands.folder = tmp_path


class TestCommands(Commands.TestCase):
    settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def play(core: BeamCore) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for _ in range(ENOUGH):
        if not core.has_work():
            return found
        for event in core.step():
            found.setdefault(event.id, []).extend(event.tokens)
    raise AssertionError("the engine does not come to an end")


def paused(core: BeamCore, finish: bool = False) -> list[TokenEvent]:
    core.life.apply(Pause(finish))
    return until_settled(core)


def test_new_weights_find_nothing_of_the_old_ones(tmp_path: Path) -> None:
    """Neither a request that comes later, nor one that waited, nor the digests that a store outside may know."""
    core = make_core(num_blocks=100)
    prompt = list(range(17))
    core.add(request("a", prompt))
    play(core)
    core.add(request("b", prompt))
    (waiting,) = core.scheduler.waiting
    root = waiting.root_hash
    paused(core)
    core.life.apply(update(tmp_path / "w", "new"))
    assert waiting.root_hash != root
    core.life.apply(Resume())
    core.add(request("c", prompt))
    assert core.scheduler.waiting.items[-1].root_hash == waiting.root_hash
    first = {}
    while core.has_work():
        for event in core.step():
            first.setdefault(event.id, event)
    assert first["b"].num_cached == 0
    assert not set(core.scheduler.groups[0].pool.cached) & {root}


def test_an_empty_prefix_cache(tmp_path: Path) -> None:
    core = make_core(num_blocks=100)
    cached = []
    for i in range(4):
        core.add(request(f"r{i}", list(range(17))))
        cached += [event.num_cached for _ in range(ENOUGH) if core.has_work() for event in core.step()][:1]
        if i == 1:
            core.life.apply(ForgetPrefixes())
    assert cached == [0, 16, 0, 16]


def test_a_search_ends_before_the_pause() -> None:
    """Its beams are requests that come later, and yet belong to what was there; another search waits."""
    alone, core = make_core(), make_core()
    search = EngineRequest("s", [1, 2, 3], SamplingParams(max_tokens=6, temperature=0.0), beams=Beams(width=2, n=1))
    alone.add(search)
    expected = play(alone)["s"]
    core.add(search)
    core.step()
    core.life.apply(Pause(finish=True))
    core.add(replace_id(search, "late"))
    events = until_settled(core)
    assert [(event.id, event.tokens) for event in events] == [("s", expected)]
    assert not core.has_work()
    core.life.apply(Resume())
    assert play(core) == {"late": expected}


def replace_id(r: EngineRequest, id: str) -> EngineRequest:
    return EngineRequest(id, r.token_ids, replace(r.params), beams=r.beams)


class Refusing(HashExecutor):
    """Two ranks, which do not agree."""

    def control(self, command: Control) -> list[Reply]:
        return [*super().control(command), Reply(False, "no room")]


def test_workers_that_do_not_agree_are_an_end(tmp_path: Path) -> None:
    kv = hash_kv(20, 4)
    limits = SchedLimits(max_tokens=16, max_rows=8, max_length=40)
    core = BeamCore(Scheduler(limits, kv, ArrivalOrder()), Refusing(kv), Intake(97, 40))
    paused(core)
    with pytest.raises(CheckpointError, match="no room"):
        core.life.apply(update(tmp_path / "w", "new"))
    assert core.failure is None, "nothing has changed anywhere"
    with pytest.raises(EngineDead, match="no room"):
        core.life.apply(Sleep(1))
    assert core.has_work(), "to say so"
    with pytest.raises(EngineDead):
        core.step()


def test_a_scheduler_that_cannot_forget_is_named(tmp_path: Path) -> None:
    core = make_core()
    core.scheduler.forget_cache = None
    for act in (ForgetPrefixes(), Sleep(1), update(tmp_path / "w", "x")):
        paused(core)
        with pytest.raises(ConfigError, match="forget"):
            core.life.apply(act)
    core.life.apply(Resume())
