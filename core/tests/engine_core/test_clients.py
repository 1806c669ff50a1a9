"""Both clients on the hash-model: streams, aborts, failures, supervision."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import pytest
from lmkit.api import CheckpointError, EngineDead, EngineRequest, PluginError, SamplingParams, TokenEvent
from lmkit.config import EngineConfig
from lmkit.engine.client import BaseClient, ProcessClient
from lmkit.engine.messages import Splitter, Submit, decode_command, encode
from lmkit_python.supervised import Supervised
from lmkit_testing.engines import HASH_FACTORY, hash_config, hash_engine, no_checkpoint, no_plan
from lmkit_testing.hash_model import HashModel, expected_tokens
from lmkit_testing.inproc import InprocClient

BUSY = 10.0  # seconds; the target is one, or two, on an idle machine: a loaded one must not fail for that


def make_client(kind: str, config: EngineConfig, **more: object) -> BaseClient:
    if kind == "process":
        return ProcessClient(config, no_plan(), no_checkpoint(), factory=HASH_FACTORY, **more)
    return InprocClient(lambda progress: hash_engine(config, no_plan(), no_checkpoint(), progress), **more)


@asynccontextmanager
async def running(kind: str, **options: object) -> AsyncIterator[BaseClient]:
    client = make_client(kind, hash_config(**options))
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def request(id: str, max_tokens: int = 8, prompt: tuple[int, ...] = (1, 2, 3)) -> EngineRequest:
    return EngineRequest(id, list(prompt), SamplingParams(max_tokens=max_tokens, temperature=0.0))


async def collect(stream: AsyncIterator[TokenEvent]) -> list[TokenEvent]:
    return [event async for event in stream]


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.tokens]


def finishes(events: list[TokenEvent]) -> list[str]:
    return [event.finish for event in events if event.finish]


both = pytest.mark.parametrize("kind", ["inproc", "process"])


@both
async def test_many_streams_get_their_own_tokens(kind: str) -> None:
    async with running(kind) as client:
        requests = [request(f"r{i}", 5 + i, (i, 2 * i, 7)) for i in range(20)]
        results = await asyncio.gather(*(collect(client.submit(r)) for r in requests))
        for r, events in zip(requests, results, strict=True):
            assert tokens_of(events) == expected_tokens(HashModel(), r.token_ids, r.params)
            assert finishes(events) == ["length"]
        stats = await client.stats()
        assert stats.sched.num_finished == 20
        assert stats.sched.num_running == 0
        assert client.num_streams == 0
    assert client.state == "dead"
    assert client.failure is None


@both
async def test_wrong_request_fails_alone(kind: str) -> None:
    async with running(kind) as client:
        bad, good = client.submit(request("bad", prompt=(1, 5000))), client.submit(request("good"))
        events = await collect(bad)
        assert finishes(events) == ["error"]
        assert events[0].error.code == "invalid-param"
        assert "5000" in events[0].error.message
        assert len(tokens_of(await collect(good))) == 8


@both
async def test_abort_ends_the_stream_and_frees_its_blocks(kind: str) -> None:
    async with running(kind, delay=0.005) as client:
        stream = client.submit(request("a", 3000))
        await anext(stream)
        client.abort(["a", "a", "unknown"])
        assert finishes(await collect(stream)) == ["abort"]
        client.abort(["a"])
        await collect(client.submit(request("b", 2)))
        stats = await client.stats()
        assert stats.sched.num_running == 0
        assert stats.sched.num_free_blocks == stats.sched.num_blocks


@both
async def test_slow_reader_delays_nobody(kind: str) -> None:
    async with running(kind) as client:
        slow = client.submit(request("slow", 2000))
        fast = await collect(client.submit(request("fast", 50)))
        assert len(tokens_of(fast)) == 50
        assert len(tokens_of(await collect(slow))) == 2000


@both
async def test_drain_refuses_new_requests_and_finishes_running_ones(kind: str) -> None:
    async with running(kind, delay=0.002) as client:
        stream = client.submit(request("a", 50))
        client.drain()
        assert client.state == "draining"
        refused = await collect(client.submit(request("b")))
        assert refused[0].error.code == "engine-busy"
        assert refused[0].error.retryable
        assert len(tokens_of(await collect(stream))) == 50


@both
async def test_crash_ends_every_stream_with_a_typed_error(kind: str) -> None:
    async with running(kind, crash_at=5) as client:
        results = await asyncio.gather(*(collect(client.submit(request(f"r{i}", 100))) for i in range(4)))
        for events in results:
            assert finishes(events) == ["error"]
            assert events[-1].error.code == EngineDead.code
            assert "RuntimeError" in events[-1].error.message
            assert "injected crash" not in events[-1].error.message  # the text of the cause is for the log
        assert client.state == "dead"
        late = await collect(client.submit(request("late")))
        assert finishes(late) == ["error"]
        with pytest.raises(Exception, match="RuntimeError"):
            await client.stats()


@both
async def test_close_ends_running_streams(kind: str) -> None:
    async with running(kind, delay=0.01) as client:
        stream = client.submit(request("a", 3000))
        await anext(stream)
        await client.close()
        events = await collect(stream)
        assert finishes(events) == ["error"]
        assert events[-1].error.code == EngineDead.code
        await client.close()


@both
async def test_start_error_arrives_with_its_type(kind: str) -> None:
    seen = []
    client = make_client(
        kind, hash_config(start_error="weights are missing"), progress=lambda *phase: seen.append(phase)
    )
    with pytest.raises(CheckpointError, match="weights are missing") as caught:
        await client.start()
    assert caught.value.fix == "use another checkpoint"
    assert client.state == "dead"
    assert seen == [("load weights", 1, 2, "B")]
    await client.close()


async def test_unknown_factory_is_a_plugin_error() -> None:
    client = ProcessClient(EngineConfig(), no_plan(), no_checkpoint(), factory="lmkit.nowhere:make")
    with pytest.raises(PluginError, match="nowhere"):
        await client.start()


async def test_killed_engine_ends_eight_streams_at_once() -> None:
    async with running("process", delay=0.005) as client:
        streams = [client.submit(request(f"r{i}", 3000)) for i in range(8)]
        for stream in streams:
            await anext(stream)
        killed = perf_counter()
        os.kill(client.pid, signal.SIGKILL)
        while client.state != "dead":
            await asyncio.sleep(0.001)
        assert perf_counter() - killed < BUSY
        results = await asyncio.gather(*(collect(stream) for stream in streams))
        assert perf_counter() - killed < BUSY
        for events in results:
            assert finishes(events) == ["error"]
            assert events[-1].error.code == EngineDead.code
            assert events[-1].error.retryable
            assert "SIGKILL" in events[-1].error.message
        assert client.failure is not None


async def test_engine_that_exits_is_reported_with_its_status() -> None:
    async with running("process", exit_at=3) as client:
        events = await collect(client.submit(request("a", 100)))
        assert "status 17" in events[-1].error.message


async def test_hanging_engine_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    client = make_client("process", hash_config(hang_at=5), stall_seconds=0.5)
    await client.start()
    began = perf_counter()
    events = await collect(client.submit(request("a", 100)))
    assert perf_counter() - began < BUSY
    assert "no progress" in events[-1].error.message
    await client.close()
    assert "most recent call first" in capfd.readouterr().err  # the stacks of its threads


async def test_a_first_step_may_take_its_time_but_not_for_ever() -> None:
    client = make_client("process", hash_config(hang_at=1), stall_seconds=0.3, first_seconds=2.0)
    await client.start()
    began = perf_counter()
    events = await collect(client.submit(request("a", 100)))
    assert 1.5 < perf_counter() - began < BUSY
    assert "no progress" in events[-1].error.message
    await client.close()


async def test_slow_engine_is_left_alone() -> None:
    client = make_client("process", hash_config(delay=0.2), stall_seconds=1.0)
    await client.start()
    assert finishes(await collect(client.submit(request("a", 6)))) == ["length"]
    await asyncio.sleep(1.2)  # idle is no stall either
    assert client.state == "ready"
    await client.close()


async def test_steps_that_are_slow_are_no_hang() -> None:
    """Each takes longer than the bound for silence: what is usual is learned from those before."""
    client = make_client("process", hash_config(delay=0.5), stall_seconds=0.3)
    await client.start()
    assert finishes(await collect(client.submit(request("a", 5)))) == ["length"]
    assert client.state == "ready"
    await client.close()


async def test_an_engine_that_was_stopped_is_seen_at_once_and_its_streams_go_on_after_it() -> None:
    async with running("process", delay=0.002) as client:
        for busy in (True, False):
            stream = client.submit(request(f"r{busy}", 500 if busy else 1))
            await anext(stream)
            if busy:
                await asyncio.sleep(0.3)
            assert client.responsive
            os.kill(client.pid, signal.SIGSTOP)
            await until(lambda: not client.responsive, 4.0)
            assert client.state == "ready"
            os.kill(client.pid, signal.SIGCONT)
            await until(lambda: client.responsive, 4.0)
            if busy:
                assert len(tokens_of(await collect(stream))) == 499


async def test_stopped_engine_process_is_gone() -> None:
    async with running("process") as client:
        pid = client.pid
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()


async def test_no_tcp_port_and_a_socket_without_a_name() -> None:
    client = ProcessClient(hash_config(start_seconds=0.0), no_plan(), no_checkpoint(), factory=HASH_FACTORY)
    await client.start()
    try:
        assert client._engine.socket.getsockname() == ""
        assert not _listening_inodes() & _socket_inodes(client.pid)
    finally:
        await client.close()


def _socket_inodes(pid: int) -> set[str]:
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(fd))
        except OSError:
            continue
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def _listening_inodes() -> set[str]:
    found = set()
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[3] == "0A":
                found.add(fields[9])
    return found


def test_frames_survive_any_cut() -> None:
    messages = [Submit(replace_id(request("x", 5), f"r{i}")) for i in range(5)]
    data = b"".join(encode(m) for m in messages)
    for size in (1, 3, 7, len(data)):
        splitter = Splitter()
        payloads = [p for at in range(0, len(data), size) for p in splitter.feed(data[at : at + size])]
        assert [decode_command(p) for p in payloads] == messages


def replace_id(r: EngineRequest, id: str) -> EngineRequest:
    return EngineRequest(id, r.token_ids, replace(r.params))


def supervised(restarts: int, **options: object) -> Supervised:
    return Supervised(lambda: make_client("process", hash_config(**options)), restarts, pause=0.05)


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = perf_counter() + seconds
    while not condition():
        assert perf_counter() < deadline
        await asyncio.sleep(0.01)


async def test_dead_engine_is_replaced() -> None:
    client = supervised(2, delay=0.005)
    await client.start()
    try:
        for _ in range(2):
            stream = client.submit(request("a", 3000))
            await anext(stream)
            first = client.client
            os.kill(first.pid, signal.SIGKILL)
            assert (await collect(stream))[-1].error.code == EngineDead.code
            assert client.state == "dead"
            await until(lambda first=first: client.client is not first and client.state == "ready")
            assert tokens_of(await collect(client.submit(request("b", 5)))) == expected_tokens(
                HashModel(), [1, 2, 3], request("b", 5).params
            )
    finally:
        await client.close()
    assert client.state == "dead"


@pytest.mark.full("lmkit-http")
async def test_engine_that_dies_again_and_again_stays_dead(caplog: pytest.LogCaptureFixture) -> None:
    client = supervised(2, exit_at=2)
    await client.start()
    seen = set()
    for _ in range(3):
        await until(lambda: client.state == "ready" and client.client not in seen)
        seen.add(client.client)
        assert finishes(await collect(client.submit(request("a", 50, (len(seen), 2))))) == ["error"]
    await until(lambda: "too often" in caplog.text)
    assert client.state == "dead"
    assert len(seen) == 3
    await client.close()


async def test_draining_engine_is_not_replaced() -> None:
    client = supervised(2, delay=0.005)
    await client.start()
    first = client.client
    stream = client.submit(request("a", 3000))
    await anext(stream)
    client.drain()
    os.kill(first.pid, signal.SIGKILL)
    assert finishes(await collect(stream)) == ["error"]
    await asyncio.sleep(0.3)
    assert client.client is first
    await client.close()


async def test_closed_while_a_new_engine_starts() -> None:
    made: list[BaseClient] = []

    def make() -> BaseClient:
        made.append(make_client("process", hash_config(exit_at=2, start_seconds=30.0 if made else 0.0)))
        return made[-1]

    client = Supervised(make, 2, pause=0.01)
    await client.start()
    await collect(client.submit(request("a", 50)))
    await until(lambda: len(made) == 2 and made[1].pid is not None)
    began = perf_counter()
    await client.close()
    assert perf_counter() - began < BUSY
    assert not Path(f"/proc/{made[1].pid}").exists()


async def test_start_can_be_cancelled() -> None:
    client = make_client("process", hash_config(start_seconds=30.0))
    starting = asyncio.ensure_future(client.start())
    await until(lambda: client.pid is not None)
    pid = client.pid
    await asyncio.sleep(0.3)
    began = perf_counter()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert perf_counter() - began < BUSY
    assert not Path(f"/proc/{pid}").exists()


# ------------------------------------------------------------------------------------- requests that outlive engines


def lasting(id: str, max_tokens: int = 300, prompt: tuple[int, ...] = (1, 2, 3), **params: object) -> EngineRequest:
    params = {"temperature": 0.0, **params}
    return EngineRequest(id, list(prompt), SamplingParams(max_tokens=max_tokens, **params), resume=True)


PARAMS = [
    {}, {"temperature": 1.0, "seed": 5}, {"temperature": 1.0}, {"logprobs": 2}, {"prompt_logprobs": 1},
    {"min_tokens": 300}, {"stop_token_ids": (7, 8, 9)}, {"logprobs": 0, "temperature": 1.0, "seed": -3},
]  # fmt: skip


async def test_streams_go_on_with_the_next_engine() -> None:
    """Nothing is lost, nothing doubled: what engines are killed at any moment say together is what one would."""
    requests = [lasting(f"r{i}", prompt=(i, 5, 6), **more) for i, more in enumerate(PARAMS)]
    async with running("process", delay=0.0) as client:
        expected = [await collect(client.submit(r)) for r in requests]
    client = supervised(5, delay=0.002)
    await client.start()
    try:
        streams = [client.submit(r) for r in requests]
        collecting = [asyncio.ensure_future(collect(stream)) for stream in streams]
        gone = client.submit(lasting("gone", 3000))
        plain = client.submit(request("plain", 3000))
        for deaths in range(3):
            await until(lambda n=deaths: client.state == "ready" and streams[0].num_tokens > 20 * n)
            os.kill(client.client.pid, signal.SIGKILL)
            await until(lambda: client.state != "ready")
            client.abort(["gone"])
        found = await asyncio.wait_for(asyncio.gather(*collecting), 30)
        assert finishes(await collect(gone)) == ["abort"]
        assert (await collect(plain))[-1].error.code == EngineDead.code
        for mine, whole in zip(found, expected, strict=True):
            assert tokens_of(mine) == tokens_of(whole)
            assert finishes(mine) == finishes(whole)
            assert mine[-1].stop_token == whole[-1].stop_token
            assert sum(event.num_cached is not None for event in mine) == 1
            for name in ("logprobs", "prompt_logprobs"):
                assert [x for e in mine for x in getattr(e, name)] == [x for e in whole for x in getattr(e, name)]
        stats = await client.stats()
        assert (stats.sched.num_running, stats.sched.num_free_blocks) == (0, stats.sched.num_blocks)
    finally:
        await client.close()


@pytest.mark.parametrize(("after", "resume"), [(0, True), (3, False)])
@pytest.mark.one_in(2)
async def test_the_poison_is_found_and_everybody_else_is_answered(
    after: int, resume: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that repeats it for ever ends neither the server nor the requests of others."""
    client = supervised(2, delay=0.002, poison=66, poison_after=after)
    await client.start()
    try:
        others = [lasting(f"r{i}", 400, prompt=(i, 5, 6)) for i in range(6)]
        collecting = [asyncio.ensure_future(collect(client.submit(r))) for r in others]
        codes = []
        for i in range(40):
            bad = lasting(f"bad{i}", 50, prompt=(1, 66, 3), seed=i)
            bad.resume = resume
            events = await asyncio.wait_for(collect(client.submit(bad)), 20)
            codes.append(events[-1].error.code)
            if codes[-1] == "quarantined":
                break
            await asyncio.sleep(0.1)
        assert codes[-1] == "quarantined"
        assert set(codes[:-1]) <= {"engine-dead", "engine-busy"}
        for other, events in zip(others, await asyncio.wait_for(asyncio.gather(*collecting), 30), strict=True):
            assert tokens_of(events) == expected_tokens(HashModel(), other.token_ids, other.params)
        again = await collect(client.submit(lasting("again", 50, prompt=(1, 66, 3), seed=99)))
        assert again[-1].error.code == "quarantined"
        other = await asyncio.wait_for(collect(client.submit(lasting("other", 9, prompt=(1, 66, 3)))), 20)
        assert other[-1].error.code == "quarantined"  # another content: it costs two deaths more
        await until(lambda: client.state == "ready")
        assert finishes(await collect(client.submit(request("fresh", 5)))) == ["length"]
        assert "request other (content " in caplog.text
        assert "was running at 2 deaths" in caplog.text
    finally:
        await client.close()


@pytest.mark.full("lmkit-http")
async def test_streams_that_wait_for_an_engine_end_when_there_will_be_none() -> None:
    for how in ("drain", "close", "too often"):
        client = supervised(0 if how == "too often" else 3, delay=0.005)
        await client.start()
        stream = client.submit(lasting("a", 3000))
        await anext(stream)
        if how == "drain":
            client.drain()
        os.kill(client.client.pid, signal.SIGKILL)
        if how == "close":
            await until(lambda c=client: c.state == "dead")
            await client.close()
        events = await asyncio.wait_for(collect(stream), 10)
        assert events[-1].error.code == EngineDead.code
        await client.close()
