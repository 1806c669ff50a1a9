"""A server, its clients, and what may happen to both, drawn from a seed. After each blow all must be well."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from lmkit.api import LmkitError
from lmkit_testing.serving import ServedLLM

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TIME = 90.0  # seconds in which all must be well again; an engine is started in a few
HEAD = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
SLACK = 96 << 20  # bytes that a process may grow by
HOSTILE = [
    b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 50_000, b'{"a":' * 5_000, b'{"messages": [{"role": "user"}]}',
    b'{"prompt": [[]], "max_tokens": 1}', b'{"prompt": "a", "max_tokens": -1}', b'{"prompt": "a", "n": 1e9}',
    b'{"prompt": "a", "logit_bias": {"x": 1}}', b'{"prompt": [99999999]}', b'{"prompt": "a", "temperature": 1e400}',
    b'{"prompt": "a", "max_tokens": 4, "repetition_penalty": 1e-300}', b'{"prompt": "\\ud800", "max_tokens": 2}',
    b'{"prompt": "a", "max_tokens": 4, "min_tokens": 4, "stop_token_ids": %s}' % json.dumps(list(range(128))).encode(),
    b'{"prompt": "a", "structured_outputs": {"regex": "(((("}, "max_tokens": 4}',
    b'{"prompt": "a", "structured_outputs": {"json": {"$ref": "#/nowhere"}}, "max_tokens": 4}',
    b'{"prompt": "a", "max_tokens": 3, "logprobs": 20, "echo": true, "stop": [""]}',
]  # fmt: skip


class Storm:
    """Blows are the methods `blow_*`. `expected` answers were asked for when all was calm."""

    def __init__(self, llm: ServedLLM, url: str, seed: int, adapter: Path | None = None) -> None:
        self.llm, self.url, self.rng, self.adapter = llm, url, random.Random(seed), adapter
        self.client: Any = llm.client
        self.http = httpx.AsyncClient(base_url=url, timeout=TIME, limits=httpx.Limits(max_connections=200))
        self.expected: dict[int, tuple[str, Any]] = {}
        self.sizes: dict[int, int] = {}  # process -> resident bytes when it was warm

    # ------------------------------------------------------------------------------------------------- requests

    def body(self, i: int) -> dict[str, Any]:
        """The i-th kind of request; its answer is always the same."""
        kinds: list[dict[str, Any]] = [
            {"temperature": 0}, {"temperature": 1, "seed": 5}, {"temperature": 0, "logprobs": 2},
            {"temperature": 1, "seed": -1, "top_p": 0.5, "frequency_penalty": 1.0},
        ]  # fmt: skip
        if self.adapter is not None:  # a real engine
            kinds += [
                {"temperature": 1, "seed": 3, "structured_outputs": {"regex": "[a-c]{30,90}"}, "ignore_eos": False}
            ]
        prompt = [5 + i, 6, 7 + i % 3] * (1 + i % 20)
        return {"prompt": prompt, "max_tokens": 40 + i % 30, "ignore_eos": True, **kinds[i % len(kinds)]}

    async def ask(self, i: int, **more: Any) -> tuple[int, str, Any]:
        response = await self.http.post(COMPLETIONS, json=self.body(i) | more)
        answer = response.json()
        if response.status_code != 200:
            return response.status_code, answer["error"]["code"], None
        choice = answer["choices"][0]
        return 200, choice["text"], choice["finish_reason"]

    async def calm(self, num: int = 12) -> None:
        """What is right is learned while nothing happens."""
        for i in range(num):
            status, *answer = await self.ask(i)
            assert status == 200, answer
            self.expected[i] = (answer[0], answer[1])

    async def company(self, num: int, resume: bool | None = None) -> list[asyncio.Task[Any]]:
        more = {} if resume is None else {"resume": resume}
        tasks = [asyncio.create_task(self._known(self.rng.choice(list(self.expected)), **more)) for _ in range(num)]
        await asyncio.sleep(self.rng.uniform(0.0, 0.3))
        return tasks

    async def _known(self, i: int, **more: Any) -> str:
        """Asks for what is known; a right answer, or the code of an error."""
        status, *answer = await self.ask(i, **more)
        if status != 200:
            return answer[0]
        assert tuple(answer) == self.expected[i], f"request {i} has another answer than alone"
        return "right"

    # ---------------------------------------------------------------------------------------------------- blows

    async def blow_kill(self) -> None:
        lasting, plain = await self.company(6), await self.company(3, resume=False)
        os.kill(self.client.client.pid, signal.SIGKILL)
        assert set(await self._all(lasting)) == {"right"}, "a stream was cut that could go on"
        assert set(await self._all(plain)) <= {"right", "engine-dead", "engine-busy"}

    async def blow_stop(self) -> None:
        tasks, pid = await self.company(6), self.client.client.pid
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(self.rng.uniform(0.1, 2.0))
        os.kill(pid, signal.SIGCONT)
        assert set(await self._all(tasks)) == {"right"}

    async def blow_bodies(self) -> None:
        tasks = await self.company(4)
        for body in self.rng.sample(HOSTILE, 8):
            path = self.rng.choice([CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
            response = await self.http.post(path, content=body, headers={"content-type": "application/json"})
            assert response.status_code < 500, (path, body[:80], response.text[:300])
        assert set(await self._all(tasks)) == {"right"}

    async def blow_leave(self) -> None:
        """Clients go away in every phase: in the head, in the body, while waiting, while reading."""
        tasks = await self.company(4)
        body = json.dumps(self.body(3) | {"max_tokens": 400, "stream": True}).encode()
        whole = HEAD % (COMPLETIONS.encode(), len(body)) + body
        for _ in range(12):
            reader, writer = await asyncio.open_connection(*self._address)
            writer.write(whole[: self.rng.choice([10, 60, len(whole) - 5, len(whole), len(whole), len(whole)])])
            await writer.drain()
            if self.rng.random() < 0.5:
                await asyncio.sleep(self.rng.uniform(0, 0.2))
            if self.rng.random() < 0.3:
                try:
                    await asyncio.wait_for(reader.read(100), 0.3)
                except TimeoutError:
                    pass
            writer.transport.abort()
        assert set(await self._all(tasks)) == {"right"}

    async def blow_slow_readers(self) -> None:
        """Answers that nobody takes delay nobody."""
        body = json.dumps(
            self.body(2) | {"n": 4, "seed": 1, "temperature": 1, "max_tokens": 150, "stream": True}
        ).encode()
        socks = []
        for _ in range(6):
            sock = socket.create_connection(self._address)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(
                b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n" % COMPLETIONS.encode()
            )
            sock.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
            socks.append(sock)
        assert set(await self._all(await self.company(6))) == {"right"}
        for sock in socks:
            sock.close()

    async def blow_adapters(self) -> None:
        """Loaded, replaced and unloaded under load; what is wrong with one is a 4xx and costs nobody anything."""
        if self.adapter is None:
            return
        tasks = await self.company(6)
        for path in self.rng.sample([str(self.adapter), str(self.adapter), "/dev", "\0", "~", "nowhere"], 4):
            body = {"lora_name": "a", "lora_path": path, "load_inplace": True}
            response = await self.http.post("/v1/load_lora_adapter", json=body)
            assert response.status_code == (200 if path == str(self.adapter) else 400), response.text
        with_adapter = await self.http.post(COMPLETIONS, json=self.body(0) | {"model": "a"})
        assert with_adapter.status_code in (200, 404)
        await self.http.post("/v1/unload_lora_adapter", json={"lora_name": "a"})
        assert set(await self._all(tasks)) == {"right"}

    # --------------------------------------------------------------------------------------------------- all well

    async def run(self, going_on: Callable[[], bool]) -> list[str]:
        blows = [name for name in dir(self) if name.startswith("blow_")]
        done = []
        try:
            await self.calm()
            await self.all_well()
            while going_on():
                name = blows[len(done)] if len(done) < len(blows) else self.rng.choice(blows)
                blow: Callable[[], Awaitable[None]] = getattr(self, name)
                await asyncio.wait_for(blow(), 2 * TIME)
                await asyncio.wait_for(self.all_well(), TIME)
                done.append(name)
        finally:
            await self.http.aclose()
        return done

    async def all_well(self) -> None:
        """Ready, nothing runs, no block is held, no process has grown, and the next answer is right."""
        while not (self.client.state == "ready" and self.client.responsive and await self._idle()):
            await asyncio.sleep(0.05)
        assert (await self.http.get("/ready")).status_code == 200
        assert set(await self._all(await self.company(3))) == {"right"}
        for pid in (os.getpid(), self.client.client.pid):
            size = resident(pid)
            assert size < self.sizes.setdefault(pid, size) + SLACK, f"process {pid} has grown to {size >> 20} MiB"

    async def _idle(self) -> bool:
        try:
            stats = (await self.client.stats()).sched
        except LmkitError:  # it has died since
            return False
        return not (stats.num_running or stats.num_waiting) and stats.num_free_blocks == stats.num_blocks

    async def _all(self, tasks: list[asyncio.Task[Any]]) -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(*tasks), TIME)

    @property
    def _address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return str(parts.hostname), int(parts.port or 80)


def resident(pid: int) -> int:
    """Bytes of memory that a process holds; 0 where the system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
