"""Streamed tokens a second through one process of the API and through several, before an engine that computes nothing.

    python bench/api_workers.py [--streams 256] [--tokens 200] [--workers 1 2]

The engine is the hash-model in its own process, with real scheduling; clients are raw sockets in this process, which
only count. All share the machine's processors, so the CPU time that each process took for a token is told beside the
rate: where they have fewer cores than processes want, only that says what more cores would bring.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, process_time
from urllib.parse import urlsplit

import uvloop
from lmkit.config import EngineConfig, SchedConfig
from lmkit_bench.result import machine
from lmkit_http.crew import Crew, Plan
from lmkit_http.run import bind, run_app, run_crew
from lmkit_http.settings import ServerSettings
from lmkit_testing.engines import hash_config, no_checkpoint
from lmkit_testing.serving import END, supervised

PATH = "/v1/chat/completions"


def serve(workers: int, streams: int, tokens: int, pipe: Connection) -> None:
    """A process: the server, until it is killed."""

    async def run() -> None:
        config = EngineConfig(sched=SchedConfig(max_rows=streams, max_tokens=8192))
        blocks = streams * (tokens // 16 + 8)
        async with supervised(config, num_blocks=blocks, max_length=tokens + 256) as llm:
            settings = ServerSettings(port=0, api_workers=workers)
            sock = bind(settings)
            if workers == 1:
                await run_app(llm, settings, sock, lambda _, url: pipe.send(url))
                return
            plan = Plan(hash_config(vocab_size=END + 1), no_checkpoint(), text="lmkit_testing.serving:open_text")
            crew = Crew(workers, sock)
            await run_crew(llm, settings, sock, crew, plan, lambda _, url: pipe.send(url))
            crew.close()

    uvloop.run(run())


class Reader(asyncio.Protocol):
    """One stream."""

    def __init__(self, request: bytes) -> None:
        self.request, self.tail = request, b""
        self.first = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self.request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.first = self.first or perf_counter()
        self.tail = (self.tail + data)[-32:]
        if b"[DONE]" in self.tail and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(EOFError("the server closed a stream"))


async def read(url: str, streams: int, tokens: int) -> tuple[float, list[Reader]]:
    """Seconds from the first request to the last token."""
    body = json.dumps({
        "messages": [{"role": "user", "content": "Hello"}], "stream": True, "ignore_eos": True, "max_tokens": tokens,
    })  # fmt: skip
    request = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    place, loop = urlsplit(url), asyncio.get_running_loop()
    began = perf_counter()
    made = [loop.create_connection(lambda: Reader(request), place.hostname, place.port) for _ in range(streams)]
    readers = [reader for _, reader in await asyncio.gather(*made)]
    await asyncio.gather(*(reader.done for reader in readers))
    return perf_counter() - began, readers


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


def measure(workers: int, streams: int, tokens: int) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(workers, streams, tokens, there))
    process.start()
    try:
        url = here.recv()
        asyncio.run(read(url, min(8, streams), 8))
        assert process.pid is not None
        pids = {process.pid: "first process", **children(process.pid)}
        before, own = {pid: cpu(pid) for pid in pids}, process_time()
        seconds, _ = uvloop.run(read(url, streams, tokens))
        num = streams * tokens
        figures = {"tokens/s": num / seconds, "us client": (process_time() - own) / num * 1e6}
        for number, (pid, name) in enumerate(pids.items()):
            figures[f"us {number} {name}"] = (cpu(pid) - before[pid]) / num * 1e6
        return figures
    finally:
        process.terminate()
        process.join(20)
        process.kill()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args(argv)
    print(json.dumps(machine()))
    for workers in args.workers:
        figures = measure(workers, args.streams, args.tokens)
        print(workers, " ".join(f"{name}: {value:.1f}" for name, value in figures.items()), flush=True)


if __name__ == "__main__":
    main()
