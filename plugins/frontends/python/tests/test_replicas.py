"""Several engines behind one client: which is chosen, what is added up, and what happens when one dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmkit import LLM, AsyncLLM, SamplingParams
from lmkit.api import CheckpointError, ConfigError, EngineRequest, TokenEvent
from lmkit.engine.client import ProcessClient
from lmkit.engine.messages import Pause, Resume, SetAdapter
from lmkit_python.replicas import SLACK, SPAN, Replicas, Router
from lmkit_python.supervised import Supervised
from lmkit_testing.engines import HASH_FACTORY, hash_config, no_checkpoint, no_plan
from lmkit_testing.hash_model import HashModel, expected_tokens


def prompt(of: int, num_tokens: int = 3 * SPAN) -> list[int]:
    return [of, *range(1, num_tokens)]


@given(
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60),
    st.sets(st.integers(0, 19)),
    st.integers(0, 99),
)
def test_nobody_is_sent_where_none_are_taken_nor_far_behind_others(
    num: int, asks: list[tuple[int, bool]], down: set[int], seed: int
) -> None:
    router, loads = Router(num, 0, seed), Counter[int]()
    up = [engine for engine in range(num) if engine not in down]
    for of, ends in asks:
        chosen = router.choose(prompt(of), "", lambda engine: None if engine in down else loads[engine])
        if chosen is None:
            assert not up
            continue
        assert chosen in up
        if num <= 4:
            assert loads[chosen] <= 2 * min(loads[engine] for engine in up) + SLACK
        loads[chosen] += not ends


def test_the_longest_known_beginning_decides() -> None:
    router, loads = Router(4, 0), [0, 0, 0, 0]
    first = router.choose(prompt(1), "", loads.__getitem__)
    assert first is not None
    loads[first] = 1
    second = router.choose(prompt(2), "", loads.__getitem__)
    assert second != first
    assert router.choose(prompt(1), "", loads.__getitem__) == first
    assert router.choose([*prompt(1), 7, 8], "", loads.__getitem__) == first
    assert router.choose(prompt(1)[:SPAN], "", loads.__getitem__) == first
    assert router.choose(prompt(1), "another adapter", loads.__getitem__) not in (first,)


def test_what_is_remembered_is_bounded() -> None:
    router = Router(2, 2000)
    for of in range(3000):
        router.choose(prompt(of), "", lambda _: 0)
        assert len(router._young) <= 2000 + 3
        assert len(router._old) <= 2000 + 3


@asynccontextmanager
async def engines(num: int = 2, **options: object) -> AsyncIterator[Replicas]:
    config = hash_config(**options)
    make = partial(ProcessClient, config, no_plan(), no_checkpoint(), factory=HASH_FACTORY)
    client = Replicas([Supervised(make, pause=0.05) for _ in range(num)])
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def ask(id: str, tokens: list[int], num: int = 8, resume: bool = False) -> EngineRequest:
    return EngineRequest(id, tokens, SamplingParams(max_tokens=num, temperature=0.0), resume=resume)


async def output(client: Replicas, request: EngineRequest) -> list[int]:
    events: list[TokenEvent] = [event async for event in client.submit(request)]
    assert events[-1].error is None
    return [token for event in events for token in event.tokens]


async def test_requests_are_spread_and_figures_added_up() -> None:
    async with engines(delay=0.005) as client:
        one = client._engines[0].facts
        assert client.facts.num_kv_tokens == 2 * one.num_kv_tokens
        assert (client.facts.max_rows, client.facts.num_ranks) == (2 * one.max_rows, 2)
        asks = [ask(f"r{i}", [i, 2, 3]) for i in range(12)]
        outputs = await asyncio.gather(*(output(client, a) for a in asks))
        assert outputs == [expected_tokens(HashModel(), a.token_ids, a.params) for a in asks]
        each = [(await engine.stats()).sched.num_finished for engine in client._engines]
        assert each == [6, 6]
        assert (await client.stats()).sched.num_finished == 12
        client.drain()
        assert client.state == "draining"
    assert client.state == "dead"
    assert client.ended


async def test_changes_reach_all_and_a_refused_one_reaches_none() -> None:
    async with engines() as client:
        await client.change(Pause())
        assert [(await engine.stats()).life for engine in client._engines] == ["paused", "paused"]
        await client.change(Resume())
        with pytest.raises((ConfigError, CheckpointError)):
            await client.change(SetAdapter("a", "/nowhere"))


async def test_one_dies_and_the_others_go_on() -> None:
    async with engines(delay=0.01) as client:
        asks = [ask(f"r{i}", [i, 2, 3], 60, resume=True) for i in range(6)]
        running = [asyncio.ensure_future(output(client, a)) for a in asks]
        await asyncio.sleep(0.2)
        os.kill(client._engines[0].client.pid, signal.SIGKILL)
        while client._engines[0].state == "ready":
            await asyncio.sleep(0.01)
        assert client.state == "ready"
        later = ask("later", [9, 9, 9])
        assert await output(client, later) == expected_tokens(HashModel(), later.token_ids, later.params)
        assert await asyncio.gather(*running) == [expected_tokens(HashModel(), a.token_ids, a.params) for a in asks]


async def test_the_demo_says_the_same_by_two_engines() -> None:
    questions = [f"What is {i} + {i}?" for i in range(4)]
    greedy = SamplingParams(max_tokens=6, temperature=0.0)
    with LLM("demo", dtype="float32", kv_memory="8MiB", threads=1) as llm:
        expected = [found.outputs[0].token_ids for found in llm.generate(questions, greedy)]
    async with AsyncLLM("demo", dtype="float32", kv_memory="8MiB", threads=1, dp=2) as llm:
        assert [found.outputs[0].token_ids for found in await llm.generate(questions, greedy)] == expected
        each = [(await engine.stats()).sched.num_finished for engine in llm.client._engines]
        assert each == [2, 2]


def test_one_engine_in_this_process_is_not_several() -> None:
    with pytest.raises(ConfigError, match="one engine"):
        LLM("demo", dp=2)
