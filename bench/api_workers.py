"""Streamed tokens a second through one process of the API and through several, before an engine that computes nothing.

    python bench/api_workers.py [--streams 256] [--tokens 200] [--workers 1 2] [--step 0]

The engine is the hash-model in its own process, with real scheduling; with `--step SECONDS` it is a timer in the first
process, that costs next to nothing and hands out a token for each stream so often, which shows the front end alone.
Clients are raw sockets in this process, which only count. All share the machine's processors, so the CPU time that each
process took for a token is told beside the rate: where they have fewer cores than processes want, only that says what
more cores would bring.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, process_time
from urllib.parse import urlsplit

import uvloop
from lmkit.api import TokenEvent
from lmkit.config import EngineConfig, SchedConfig
from lmkit.engine.client import BaseClient
from lmkit.engine.messages import Command, EngineFacts, Events, Submit
from lmkit_bench.result import machine
from lmkit_http.crew import Crew, Plan
from lmkit_http.run import bind, run_app, run_crew
from lmkit_http.settings import ServerSettings
from lmkit_testing.engines import hash_config, no_checkpoint, no_plan
from lmkit_testing.serving import END, ServedLLM, supervised, text_side

PATH = "/v1/chat/completions"
EARLY = 0.1  # of the streams have ended: then it is over


class Timer(BaseClient):
    """One token for each request and step."""

    def __init__(self, step: float, streams: int) -> None:
        super().__init__()
        self.state, self.facts = "ready", EngineFacts("timer", 4096, 1 << 24, END + 1, max_rows=streams)
        self._step, self._left = step, dict[str, int]()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def _send(self, command: Command) -> None:
        if isinstance(command, Submit):
            self._left[command.request.id] = command.request.params.max_tokens or 1
            if self._task is None or self._task.done():
                self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while self._left:
            await asyncio.sleep(self._step)
            events = [TokenEvent(id, [97], None if left > 1 else "length") for id, left in self._left.items()]
            self._left = {id: left - 1 for id, left in self._left.items() if left > 1}
            self._receive(Events(events))


@asynccontextmanager
async def engine(step: float, streams: int, tokens: int) -> AsyncIterator[ServedLLM]:
    if step:
        yield ServedLLM(Timer(step, streams), text_side(), no_plan())
        return
    config = EngineConfig(sched=SchedConfig(max_rows=streams, max_tokens=8192))
    blocks = streams * (tokens // 16 + 8)
    async with supervised(config, num_blocks=blocks, max_length=tokens + 256) as llm:
        yield llm


def serve(workers: int, streams: int, tokens: int, step: float, pipe: Connection) -> None:
    """A process: the server, until it is killed."""

    async def run() -> None:
        async with engine(step, streams, tokens) as llm:
            settings = ServerSettings(port=0, api_workers=workers)
            sock = bind(settings)
            if workers == 1:
                await run_app(llm, settings, sock, lambda _, url: pipe.send(url))
                return
            plan = Plan(
                hash_config(EngineConfig(log_level="warning"), vocab_size=END + 1),
                no_checkpoint(),
                text="lmkit_testing.serving:open_text",
            )
            crew = Crew(workers, sock)
            await run_crew(llm, settings, sock, crew, plan, lambda _, url: pipe.send(url))
            crew.close()

    uvloop.run(run())


class Reader(asyncio.Protocol):
    """One stream."""

    def __init__(self, request: bytes) -> None:
        self.request, self.tail, self.num, self.begun = request, b"", 0, False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self.request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.num += data.count(b"data: ")
        self.begun = True
        self.tail = (self.tail + data)[-32:]
        if b"[DONE]" in self.tail and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(EOFError("the server closed a stream"))


async def read(url: str, streams: int, tokens: int, pids: Sequence[int] = ()) -> tuple[float, list[float]]:
    """Tokens a second from when all streams have begun until some have ended, and the microseconds that each
    process, and this one, took for a token."""
    body = json.dumps({
        "messages": [{"role": "user", "content": "Hello"}], "stream": True, "ignore_eos": True, "max_tokens": tokens,
    })  # fmt: skip
    request = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    place, loop = urlsplit(url), asyncio.get_running_loop()
    made = [loop.create_connection(lambda: Reader(request), place.hostname, place.port) for _ in range(streams)]
    readers = [reader for _, reader in await asyncio.gather(*made)]

    def now() -> tuple[float, int, list[float]]:
        return perf_counter(), sum(reader.num for reader in readers), [*map(cpu, pids), process_time()]

    while not all(reader.begun for reader in readers):
        await asyncio.sleep(0.01)
    began, before, taken = now()
    while sum(reader.done.done() for reader in readers) < EARLY * streams:
        await asyncio.sleep(0.02)
    ended, after, took = now()
    await asyncio.gather(*(reader.done for reader in readers))
    # not every token has a chunk of its own
    num = max(1.0, streams * tokens * (after - before) / sum(reader.num for reader in readers))
    return num / (ended - began), [1e6 * (b - a) / num for a, b in zip(taken, took, strict=True)]


def cpu(pid: int) -> float:
    """Seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> dict[int, str]:
    found = {}
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            found[child] = next((w.decode() for w in words if w.startswith((b"lmkit.", b"lmkit_"))), "other")
    return found


def measure(workers: int, streams: int, tokens: int, step: float) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(workers, streams, tokens, step, there))
    process.start()
    try:
        url = here.recv()
        asyncio.run(read(url, min(8, streams), 8))
        assert process.pid is not None
        pids = {process.pid: "first process", **children(process.pid)}
        rate, took = uvloop.run(read(url, streams, tokens, list(pids)))
        names = [f"us {number} {name}" for number, name in enumerate([*pids.values(), "client"])]
        return {"tokens/s": rate, **dict(zip(names, took, strict=True))}
    finally:
        process.terminate()
        process.join(20)
        process.kill()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step", type=float, default=0.0)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args(argv)
    print(machine())
    for workers in args.workers:
        figures = measure(workers, args.streams, args.tokens, args.step)
        print(workers, " ".join(f"{name}: {value:.1f}" for name, value in figures.items()), flush=True)


if __name__ == "__main__":
    main()
