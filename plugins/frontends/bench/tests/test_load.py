"""Load generators and the client, against a server that says exactly what it is told, when it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from lmkit.api import ConfigError, EngineError
from lmkit_bench.client import Client
from lmkit_bench.plot import front
from lmkit_bench.serve import Load, closed_loop, greatest_rate, metrics, open_loop, run_loads
from lmkit_bench.stats import Slo, Timing
from lmkit_bench.workload import Prompt, random_prompts, random_texts, read_dataset

TICK = 0.05  # seconds; what a loaded machine adds must be small beside it


def chunk(text: str, usage: tuple[int, int] | None = None) -> bytes:
    body: dict[str, object] = {"choices": [{"text": text}]}
    if usage:
        body = {"choices": [], "usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


ANSWER: list[tuple[float, bytes]] = [
    (4 * TICK, chunk("")),  # an event without text is no token
    (2 * TICK, chunk("ab")),
    (TICK, chunk("c")),
    (3 * TICK, chunk("d")),
    (0, chunk("", (7, 5))),
    (0, b"data: [DONE]\n\n"),
]


class Fake:
    """Answers every completion with the same script of (seconds before, bytes)."""

    def __init__(self, script: Sequence[tuple[float, bytes]], status: int = 200) -> None:
        self.script, self.status = script, status
        self.bodies: list[dict[str, object]] = []
        self.active = self.most = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b"":
            length = next((int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-l")), 0)
            body = await reader.readexactly(length)
            if head.startswith(b"GET"):
                data = b'{"data": [{"id": "fake"}]}'
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
                continue
            self.bodies.append(json.loads(body))
            self.active += 1
            self.most = max(self.most, self.active)
            writer.write(b"HTTP/1.1 %d X\r\ntransfer-encoding: chunked\r\n\r\n" % self.status)
            for wait, data in self.script:
                await asyncio.sleep(wait)
                writer.write(b"%x\r\n" % len(data) + data + b"\r\n")
            writer.write(b"0\r\n\r\n")
            self.active -= 1


@asynccontextmanager
async def serving(fake: Fake) -> AsyncIterator[str]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await fake.answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def ask(fake: Fake, **options: bool) -> Timing:
    async with serving(fake) as url, Client(url, **options) as client:
        await client.open()
        assert client.model == "fake"
        return await client.complete(Prompt([300, 301], 5))


async def test_times_of_a_scripted_answer() -> None:
    """A machine that is busy makes them longer, never shorter."""
    fake = Fake(ANSWER)
    timing = await ask(fake)
    assert timing.ok
    assert timing.ttft > 5.9 * TICK
    assert len(timing.itl) == 2
    assert timing.ttft + sum(timing.itl) > 9.9 * TICK
    assert timing.e2e > 9.9 * TICK
    assert timing.e2e == pytest.approx(timing.ttft + sum(timing.itl))
    assert (timing.num_prompt_tokens, timing.num_tokens) == (7, 5)
    assert timing.tpot == pytest.approx(sum(timing.itl) / 4, abs=0.01)
    assert fake.bodies[0]["prompt"] == [300, 301]
    standard = {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
    assert set(fake.bodies[0]) == standard
    await ask(fake, ignore_eos=True)
    assert fake.bodies[1]["ignore_eos"] is True


async def test_chat() -> None:
    """Reasoning is output as well; a role alone is none."""
    deltas: list[dict[str, object]] = [{"role": "assistant"}, {"reasoning_content": "a"}, {"content": "b"}, {}]
    script = [(0.0, b"data: " + json.dumps({"choices": [{"delta": d}]}).encode() + b"\n\n") for d in deltas]
    fake = Fake([*script, (0.0, b"data: [DONE]\n\n")])
    timing = await ask(fake, chat=True)
    assert timing.ok
    assert len(timing.events) == 2
    assert fake.bodies[0]["messages"] == [{"role": "user", "content": [300, 301]}]
    assert "prompt" not in fake.bodies[0]


@pytest.mark.parametrize("start", [0.01, 1.0, 7.0, 64.0])
async def test_the_greatest_rate_within_an_slo(start: float) -> None:
    """A server that keeps it up to 7 requests a second is found from either side, within a tenth."""
    asked: list[float] = []

    async def share(rate: float) -> float:
        asked.append(rate)
        return 1.0 if rate <= 7 else 0.5

    found = await greatest_rate(share, start, steps=4)
    assert 0.9 * 7 <= found <= 7
    assert len(asked) <= 16


async def test_no_rate_within_an_slo() -> None:
    async def share(rate: float) -> float:
        return 0.0

    assert await greatest_rate(share, 1.0) == 0.0


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        ([(0, b'{"error": "no"}')], 503, "HTTP 503"),
        ([(0, chunk("a")), (0, b'data: {"error": {"message": "the engine died"}}\n\n')], 200, "engine died"),
        ([(0, b"data: not json\n\n")], 200, "DecodeError"),
        ([(0, b"data: [DONE]\n\n")], 200, "without a token"),
    ],
)
async def test_what_goes_wrong_is_in_the_timing(script: list[tuple[float, bytes]], status: int, words: str) -> None:
    timing = await ask(Fake(script, status))
    assert not timing.ok
    assert words in timing.error


async def test_nobody_listens() -> None:
    async with Client("http://127.0.0.1:9") as client:
        with pytest.raises(EngineError, match="does not say what it serves"):
            await client.open()
    with pytest.raises(ConfigError, match="no address"):
        Client("localhost:8000")


async def test_loads_of_a_scripted_server() -> None:
    fake = Fake([(TICK / 2, chunk("a")), (TICK / 2, chunk("b")), (0, chunk("", (4, 2))), (0, b"data: [DONE]\n\n")])
    loads = [Load("concurrency", 3), Load("rate", 50)]
    count = 0

    def advance() -> None:
        nonlocal count
        count += 1

    async with serving(fake) as url:
        found = await run_loads(
            Client(url), loads, lambda load, number: random_prompts(9, 4, 2, seed=number),
            slo=Slo(ttft=10), advance=advance,
        )  # fmt: skip
    assert count == 18
    assert fake.most >= 3
    assert 0.2 * 3 / TICK < found["concurrency 3/requests"].median <= 3 / TICK
    assert found["concurrency 3/output"].median == pytest.approx(2 * found["concurrency 3/requests"].median)
    assert found["concurrency 3/total"].median == pytest.approx(6 * found["concurrency 3/requests"].median)
    assert found["rate 50/goodput"].median == pytest.approx(found["rate 50/requests"].median)
    assert len(found["rate 50/ttft"].samples) == 9


async def test_closed_loop_keeps_so_many_at_work() -> None:
    active, most = 0, 0

    async def send(prompt: Prompt) -> Timing:
        nonlocal active, most
        active += 1
        most = max(most, active)
        await asyncio.sleep(0.002)
        active -= 1
        return Timing(0.0, [float(prompt.num_output)], num_tokens=1)

    prompts = [Prompt([1], n) for n in range(20)]
    timings = await closed_loop(send, prompts, 4)
    assert most == 4
    assert [t.events[0] for t in timings] == list(range(20))


async def test_open_loop_does_not_wait_for_answers() -> None:
    """All are sent before the first is answered: the rate is kept, whoever waits."""
    release, sent = asyncio.Event(), 0

    async def send(prompt: Prompt) -> Timing:
        nonlocal sent
        sent += 1
        if sent == 10:
            release.set()
        await release.wait()
        return Timing(0.0, [1.0], num_tokens=1)

    async with asyncio.timeout(10):
        assert len(await open_loop(send, [Prompt([1], 1)] * 10, rate=500)) == 10


def test_failed_requests_count_as_errors_only() -> None:
    good = Timing(0.0, [1.0, 2.0], num_prompt_tokens=3, num_tokens=2)
    found = metrics([good, Timing(0.5, error="refused")], Slo(ttft=2))
    assert found["errors"].samples == [1.0]
    assert found["requests"].samples == [0.5]
    assert found["goodput"].samples == [0.5]
    assert found["ttft"].samples == [1.0]
    with pytest.raises(EngineError, match="refused"):
        metrics([Timing(0.5, error="refused")])


def test_random_prompts_share_a_prefix_and_nothing_else() -> None:
    prompts = random_prompts(3, 40, 2, prefix=30, seed=5)
    ids = [p.prompt for p in prompts]
    assert all(len(i) == 40 and i[:30] == ids[0][:30] for i in ids)
    assert len({tuple(i[30:]) for i in ids}) == 3
    assert prompts == random_prompts(3, 40, 2, prefix=30, seed=5)
    assert prompts != random_prompts(3, 40, 2, prefix=30, seed=6)
    with pytest.raises(ConfigError, match="prefix"):
        random_prompts(1, 4, 1, prefix=4)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: not JSON"),
        ("{}", "line 2: needs a prompt"),
        ('{"token_ids": [1, -2]}', "line 2: needs a prompt"),
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens is 0"),
    ],
)
def test_wrong_lines_are_named(line: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Hello"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=words):
        read_dataset(file, 4)


def test_dataset(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Hello", "max_tokens": 9}\n\n{"token_ids": [5, 6]}\n')
    assert read_dataset(file, 4) == [Prompt("Hello", 9), Prompt([5, 6], 4)]


def test_conversations(tmp_path: Path) -> None:
    file = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "x" * 40}, {"from": "human", "value": "y"}]
    others = [{"conversations": turns[:1]}, {"conversations": turns[1:]}]
    file.write_text(json.dumps([{"id": "a", "conversations": turns}, *others]))
    assert read_dataset(file, 4) == [Prompt("Hello?", 10)]
    for text in ("[1]", "[", '[{"conversations": 1}]', '[{"conversations": [{"from": "human"}, {}]}]', "[]"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="conversation"):
            read_dataset(file, 4)


def test_random_texts() -> None:
    first, second = random_texts(2, 5, 3, prefix=2, seed=1)
    assert isinstance(first.prompt, str)
    assert isinstance(second.prompt, str)
    assert len(first.prompt.split()) == 5
    assert first.prompt.split()[:2] == second.prompt.split()[:2]
    assert first.prompt != second.prompt


def test_the_points_that_no_other_beats() -> None:
    assert front([(1, 10), (2, 9), (2, 3), (3, 9), (4, 1), (0.5, 10)]) == [(1, 10), (3, 9), (4, 1)]
