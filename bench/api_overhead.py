"""CPU of the API process per streamed token, with a fake engine: python bench/api_overhead.py [--streams 64].

The engine is a timer that hands a batch of one token per running request to the client, as the real one does once per
step; the HTTP clients are raw sockets in a process of their own, so their time is not counted. Reported: CPU
microseconds per token, for the whole server, and for each phase alone; and those per request that is refused at the
door, since there is no room.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
import uvloop
from lmkit.api import EngineRequest, SamplingParams, TokenEvent, ToolDef
from lmkit.engine.client import BaseClient
from lmkit.engine.messages import Command, EngineFacts, Events, Report, Submit, decode_report, encode
from lmkit_dialect_openai.dialect import CHAT, OpenAI
from lmkit_http.app import _chunks, build_app
from lmkit_http.backend import Backend
from lmkit_http.dialect import Incoming
from lmkit_http.run import bind, transport
from lmkit_http.settings import ServerSettings
from lmkit_python.front.prepare import Turn
from lmkit_python.front.run import Generation
from lmkit_testing.serving import ServedLLM, text_side

BODY = {"messages": [{"role": "user", "content": "Hello"}], "stream": True, "ignore_eos": True}
KEY, CONNECTIONS = "secret", 16
TEXT = "The quick brown fox jumps over the lazy dog. "


class TimerClient(BaseClient):
    """One token per request and step."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.state = "ready"
        self.facts = EngineFacts("fake", 1 << 20, 1 << 24, 257)
        self.num_tokens = num_tokens
        self.at: dict[str, int] = {}

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def _send(self, command: Command) -> None:
        if isinstance(command, Submit):
            self.at[command.request.id] = 0

    def step(self, script: list[int]) -> bytes:
        """The frame of one step, as the engine process would write it."""
        events = []
        for id, at in list(self.at.items()):
            last = at + 1 == self.num_tokens
            self.at[id] = at + 1
            if last:
                del self.at[id]
            events.append(TokenEvent(id, [script[at % len(script)]], "length" if last else None))
        return encode(Events(events))

    def receive(self, report: Report) -> None:
        self._receive(report)


def readers(port: int, num_streams: int, num_tokens: int) -> None:
    """All clients, in their own process: they only read until the end."""

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(num_tokens))
        while b"[DONE]" not in await reader.read(1 << 16):
            pass
        writer.close()

    async def run() -> None:
        await asyncio.gather(*(one() for _ in range(num_streams)))

    asyncio.run(run())


def refused(port: int, num: int) -> None:
    """Asks so many times, over CONNECTIONS connections at a time."""
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)]
    for _ in range(num // CONNECTIONS):
        for connection in connections:
            connection.sendall(request(1))
        for connection in connections:
            answer = b""
            while not answer.endswith(b"}}"):
                answer += connection.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 503"), answer


def request(num_tokens: int) -> bytes:
    body = json.dumps(BODY | {"max_completion_tokens": num_tokens}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@asynccontextmanager
async def serving(client: TimerClient) -> AsyncIterator[tuple[Backend, int]]:
    """The server as `lmkit serve` has it, and its port."""
    settings = ServerSettings(port=0, api_keys=(KEY,))
    sock = bind(settings)
    app = build_app(ServedLLM(client, text_side()), settings)
    server = uvicorn.Server(transport(app, settings))
    task = asyncio.create_task(server._serve([sock]))
    while not server.started:
        await asyncio.sleep(0.01)
    yield app.state.backend, sock.getsockname()[1]
    server.should_exit = True
    await task
    sock.close()


def beside(work: Callable[..., None], *args: int) -> multiprocessing.process.BaseProcess:
    """A process of its own."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=args)
    process.start()
    return process


async def whole_server(num_streams: int, num_tokens: int, step: float) -> float:
    """CPU microseconds per token of this process."""
    client = TimerClient(num_tokens)
    script = text_side().tokenizer.encode(TEXT)
    async with serving(client) as (backend, port):
        process = beside(readers, port, num_streams, num_tokens)
        while len(client.at) < num_streams:
            await asyncio.sleep(0.01)
        made = 0.0  # the engine's share, measured and taken off
        begin = time.process_time()
        while client.at:
            before = time.process_time()
            frame = client.step(script)
            made += time.process_time() - before
            client.receive(decode_report(frame[4:]))
            await asyncio.sleep(step)
        while backend.running:
            await asyncio.sleep(0.005)
        used = time.process_time() - begin - made
        process.join()
    return used / (num_streams * num_tokens) * 1e6


async def refusal(num: int = 8000) -> float:
    """CPU microseconds per refused request of this process."""
    async with serving(TimerClient(1)) as (backend, port):
        backend.num_preparing = 1 << 20

        def count() -> float:
            told = backend.metrics.render(None, True).decode()
            return float((told.partition('status="503"} ')[2] or "0").split()[0])

        process = beside(refused, port, num)
        while not (first := count()):
            await asyncio.sleep(0.001)
        begin = time.process_time()
        while process.is_alive():
            await asyncio.sleep(0.05)
        used = time.process_time() - begin
        assert not process.exitcode
        return used / (count() - first) * 1e6


def phase(name: str, num: int, work: Callable[[], Any]) -> None:
    begin = time.process_time()
    work()
    print(f"  {name:<44}{(time.process_time() - begin) / num * 1e6:8.1f} us")


def phases(num_streams: int, num: int = 20_000) -> None:
    """Each part alone, per token."""
    side = text_side()
    script = side.tokenizer.encode(TEXT)
    tokens = [script[i % len(script)] for i in range(num)]
    params = SamplingParams(max_tokens=num)
    detokenizer = side.tokenizer.detokenizer()
    phase("detokenize", num, lambda: [detokenizer.feed(t) for t in tokens])
    events = [TokenEvent("r", [t]) for t in tokens]
    plain = side.output_stream(params, parse=False)
    phase("OutputStream, text only", num, lambda: [plain.feed(e) for e in events])
    stopped = side.output_stream(SamplingParams(stop=("\n\n", "User:", "</s>")), parse=False)
    phase("OutputStream, three stop strings", num, lambda: [stopped.feed(e) for e in events])
    parsed = side.output_stream(params, tools=[ToolDef("f")])
    phase("OutputStream, reasoning and tool parsers", num, lambda: [parsed.feed(e) for e in events])
    frame = encode(Events([TokenEvent(f"chatcmpl-{i:032x}-0", [7]) for i in range(num_streams)]))[4:]
    rounds = num // num_streams
    phase("decode the engine's frame", rounds * num_streams, lambda: [decode_report(frame) for _ in range(rounds)])

    class Script:
        state, failure = "ready", None

        async def submit(self, request: Any) -> Any:
            for e in events:
                yield e

        def abort(self, ids: Any) -> None: ...

    backend = build_app(ServedLLM(TimerClient(1), side)).state.backend

    async def drive(metrics: Any) -> int:
        exchange = OpenAI().parse(Incoming(CHAT, json.dumps(BODY).encode()), backend.served)
        turn = Turn(0, "", EngineRequest("r", [1], params), side.output_stream(params), "")
        generation = Generation(Script(), [turn], metrics)  # type: ignore[arg-type]
        return sum([len(chunk) async for chunk in _until(_chunks(backend, exchange, generation), num - 8)])

    phase("stream to chunks, encoded", num, lambda: asyncio.run(drive(None)))
    phase("  with metrics", num, lambda: asyncio.run(drive(backend.metrics)))


async def _until(chunks: Any, num: int) -> Any:
    async for chunk in chunks:
        num -= 1
        yield chunk
        if not num:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300, help="per stream")
    parser.add_argument("--step", type=float, default=0.02, help="seconds between steps of the fake engine")
    args = parser.parse_args()
    print(
        f"API process, {args.streams} streams x {args.tokens} tokens, one token per stream every {args.step * 1e3:g} ms"
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        used = runner.run(whole_server(args.streams, args.tokens, args.step))
        print(f"  {'whole server, from frame to socket':<44}{used:8.1f} us of CPU per token (budget: 100)")
        used = runner.run(refusal())
    print(f"  {'a refusal, from socket to socket':<44}{used:8.1f} us of CPU (budget: 60)")
    print("phases alone, per token")
    phases(args.streams)


if __name__ == "__main__":
    main()
