"""One engine for several threads: nobody waits for a thread that does something else, and events keep their order."""

from __future__ import annotations

import random
from collections.abc import Callable
from threading import Barrier, Thread
from typing import Any

import pytest
from lmkit.api import EngineDead, EngineRequest, InvalidParam, SamplingParams
from lmkit.engine.shared import Caller, SharedCore
from lmkit_testing.engines import hash_config, hash_engine, no_checkpoint, no_plan

SECONDS = 60  # until a test says that a thread hangs


def request(id: str, length: int = 5, max_tokens: int = 6) -> EngineRequest:
    return EngineRequest(id, list(range(1, length + 1)), SamplingParams(max_tokens=max_tokens, temperature=0))


@pytest.fixture
def core() -> Any:
    engine = hash_engine(hash_config(num_blocks=200, block_size=4, max_length=200), no_plan(), no_checkpoint())
    yield engine.core
    engine.close()


def collect(call: Caller) -> dict[str, list[int]]:
    """The tokens of every request of a call, until all have finished."""
    tokens: dict[str, list[int]] = {}
    while call.open:
        for id, what in call.wait():
            if isinstance(what, Exception):
                raise what
            tokens.setdefault(id, []).extend(what.tokens)
    return tokens


def together(*works: Callable[[], None]) -> None:
    """Runs them in threads; raises what one of them raised, or that one hangs."""
    failed: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as e:
            failed.append(e)

    threads = [Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "a thread hangs"
    if failed:
        raise failed[0]


def idle(core: Any) -> bool:
    stats = core.stats()
    return stats.num_running == stats.num_waiting == 0 and stats.num_free_blocks == stats.num_blocks


def test_threads_share_steps_and_get_what_they_would_get_alone(core: Any) -> None:
    shared = SharedCore(core, room=8)
    with shared.open() as call:
        call.add(request("alone"))
        (expected,) = collect(call).values()
    before = core.stats().num_steps
    barrier, found = Barrier(8), []

    def work(number: int) -> None:
        with shared.open() as call:
            for i in range(3):
                call.add(request(f"{number}-{i}"))
            barrier.wait()
            found.append(collect(call))

    together(*(lambda n=n: work(n) for n in range(8)))
    assert [tokens for answer in found for tokens in answer.values()] == [expected] * 24
    assert core.stats().num_steps - before < 24 * 6 / 2  # not one after another
    assert idle(core)


def test_a_caller_that_does_something_else_stops_nobody(core: Any) -> None:
    shared = SharedCore(core, room=8)
    with shared.open() as open_stream:
        open_stream.add(request("slow", max_tokens=50))
        open_stream.wait()

        def work() -> None:
            with shared.open() as call:
                call.add(request("quick"))
                collect(call)

        together(work)
        assert len(collect(open_stream)["slow"]) >= 40  # nothing of it was lost meanwhile
    assert idle(core)


def test_leaving_early_frees_everything_also_while_others_step(core: Any) -> None:
    shared = SharedCore(core, room=4)
    rng = random.Random(0)
    plans = [(n, rng.randrange(1, 6), rng.random() < 0.5) for n in range(12)]

    def work(number: int, num: int, leaves: bool) -> None:
        with shared.open() as call:
            for i in range(num):
                call.add(request(f"{number}-{i}", length=1 + i, max_tokens=4 + i))
            if leaves:
                call.wait()
                call.abort(f"{number}-0")
            else:
                assert len(collect(call)) == num

    together(*(lambda p=p: work(*p) for p in plans))
    with shared.open() as call:
        call.add(request("last"))
        collect(call)
    assert idle(core)


def test_more_requests_than_there_is_room_for_wait_in_order(core: Any) -> None:
    shared = SharedCore(core, room=2)
    with shared.open() as call:
        for i in range(9):
            call.add(request(str(i)))
        order = []
        while call.open:
            for id, what in call.wait():
                assert not isinstance(what, Exception), what
                if what.finish is not None:
                    order.append(id)
                assert core.stats().num_running + core.stats().num_waiting <= 2
    assert order == [str(i) for i in range(9)]


def test_what_is_wrong_with_a_request_is_its_caller_s(core: Any) -> None:
    shared = SharedCore(core, room=8)

    def wrong() -> None:
        with shared.open() as call:
            call.add(EngineRequest("wrong", [1, 10**9], SamplingParams()))
            (item,) = call.wait()
            assert isinstance(item[1], InvalidParam)
            assert not call.open

    def right() -> None:
        with shared.open() as call:
            call.add(request("right"))
            assert len(collect(call)["right"]) == 6

    together(wrong, right, wrong)
    assert idle(core)


def test_an_id_that_is_in_use_is_refused_to_the_second(core: Any) -> None:
    shared = SharedCore(core, room=8)
    with shared.open() as first, shared.open() as second:
        first.add(request("same"))
        second.add(request("same"))
        (item,) = second.wait()
        assert isinstance(item[1], InvalidParam)
        assert len(collect(first)["same"]) == 6
    assert idle(core)


def test_a_dead_engine_ends_every_call(core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedCore(core, room=8)

    def step() -> list[Any]:
        raise EngineDead("rank 0 is gone")

    monkeypatch.setattr(core, "step", step)
    barrier = Barrier(3)

    def work(name: str) -> None:
        with shared.open() as call:
            call.add(request(name))
            barrier.wait()
            with pytest.raises(EngineDead):
                collect(call)

    together(*(lambda n=n: work(n) for n in "abc"))


def test_closing_ends_who_waits(core: Any) -> None:
    shared = SharedCore(core, room=8)
    with shared.open() as call:
        call.add(request("x", max_tokens=50))
        call.wait()
        assert shared.close()
        assert not shared.close()
        with pytest.raises(EngineDead, match="closed"):
            collect(call)
    with pytest.raises(EngineDead), shared.open():
        pass
    with pytest.raises(EngineDead), shared.alone():
        pass
