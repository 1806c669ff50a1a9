"""Replicas behind Ray Serve: which one is asked, what comes through, and what happens when one dies."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'lmkit-ray-serve[ray]'")

import ray
from lmkit.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from lmkit_executor_ray.cluster import connect
from lmkit_ray_serve.application import Front, application
from lmkit_ray_serve.asgi import Asked, call
from lmkit_ray_serve.router import PrefixRouter, beginning
from ray import serve
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse

KILLS = int(os.environ.get("RAY_KILLS", "1"))


def asked(path: str = "/", body: bytes = b"") -> Asked:
    return Asked("POST", path, b"a=1", [(b"content-type", b"text/plain")], None, body)


def test_an_answer_comes_as_it_is_made() -> None:
    more = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        body = await request.body()

        async def parts() -> Any:
            yield body
            await more.wait()
            yield request.url.query

        await StreamingResponse(parts(), status_code=201)(scope, receive, send)

    async def run() -> list[Any]:
        found = []
        async for part in call(app, asked(body=b"hello")):
            found.append(part)
            if part == b"hello":
                more.set()  # it is here before the rest is made
        return found

    head, *parts = asyncio.run(run())
    assert head[0] == 201
    assert parts == [b"hello", b"a=1"]


def test_who_leaves_has_hung_up() -> None:
    gone = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def parts() -> Any:
            try:
                while True:
                    yield b"x"
                    await asyncio.sleep(0)
            finally:
                gone.append(True)

        await StreamingResponse(parts())(scope, receive, send)

    async def run() -> None:
        answer = call(app, asked())
        await anext(answer)
        await anext(answer)
        await answer.aclose()

    asyncio.run(run())
    assert gone


def test_what_an_application_raises_is_raised() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/":
            raise ValueError("no")
        await PlainTextResponse("yes")(scope, receive, send)

    async def run(path: str) -> list[Any]:
        return [part async for part in call(app, asked(path))]

    with pytest.raises(ValueError, match="no"):
        asyncio.run(run("/"))
    assert asyncio.run(run("/x"))[1:] == [b"yes"]


def test_a_body_has_a_bound() -> None:
    """Nobody is asked, and what comes behind the bound is not read."""
    parts = [{"type": "http.request", "body": b"x" * 4, "more_body": True} for _ in range(9)]

    async def receive() -> Any:
        return parts.pop()

    async def run() -> Any:
        front = Front(SimpleNamespace(options=lambda **_: None), 10)  # type: ignore[arg-type]
        return await front(Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive))

    answer = asyncio.run(run())
    assert (answer.status_code, json.loads(answer.body)["error"]["code"]) == (413, "body-too-large")
    assert len(parts) == 6


def test_the_beginning_of_a_request() -> None:
    one = {"temperature": 0, "messages": [{"role": "user", "content": "a"}], "model": "m", "system": "s"}
    two = {"model": "m", "system": "s", "messages": [*one["messages"], {"role": "user", "content": "b"}], "n": 2}  # type: ignore[misc]
    found = [beginning(json.dumps(body).encode()) for body in (one, two)]
    assert found[0][0] == found[1][0] == "m/None"
    assert found[1][1].startswith(found[0][1][:-2])
    assert beginning(b"{") == beginning(b"[]") == ("", b"")


class TestRouter:
    @pytest.fixture
    def router(self) -> PrefixRouter:
        router = PrefixRouter.__new__(PrefixRouter)
        router.initialize_state()
        self.loads: dict[str, int] = {}
        router._replica_queue_len_cache = SimpleNamespace(get=self.loads.get)  # type: ignore[assignment]
        return router

    @staticmethod
    def choose(router: PrefixRouter, replicas: list[Any], prompt: bytes) -> Any:
        request = SimpleNamespace(args=["m", prompt], routing_context=SimpleNamespace())
        ranks = asyncio.run(router.choose_replicas(replicas, request))  # type: ignore[arg-type]
        assert sorted(one.replica_id for rank in ranks for one in rank) == [one.replica_id for one in replicas]
        return ranks[0][0].replica_id

    def test_a_prompt_goes_where_its_beginning_was(self, router: PrefixRouter) -> None:
        replicas = [SimpleNamespace(replica_id=name) for name in "abc"]
        prompts = [bytes([i]) * 400 for i in range(3)]
        homes = []
        for prompt in prompts:
            homes.append(self.choose(router, replicas, prompt))
            self.loads[homes[-1]] = self.loads.get(homes[-1], 0) + 1
        assert sorted(homes) == ["a", "b", "c"]
        assert [self.choose(router, replicas, prompt + b"more" * 100) for prompt in prompts] == homes
        self.loads[homes[0]] = 30
        assert self.choose(router, replicas, prompts[0]) != homes[0]

    def test_replicas_come_and_go(self, router: PrefixRouter) -> None:
        replicas = [SimpleNamespace(replica_id=name) for name in "ab"]
        home = self.choose(router, replicas, b"x" * 400)
        left = [one for one in replicas if one.replica_id != home]
        assert self.choose(router, left, b"x" * 400) == left[0].replica_id
        assert asyncio.run(router.choose_replicas([])) == []
        many = [SimpleNamespace(replica_id=f"{i:03}") for i in range(100)]
        self.choose(router, many, b"y" * 400)


@pytest.mark.slow
class TestServed:
    @pytest.fixture(scope="class")
    @classmethod
    def url(cls) -> Iterator[str]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        connect("local", 4)
        config = EngineConfig(
            model=ModelConfig(model="demo"), cache=CacheConfig(num_blocks=400), parallel=ParallelConfig(threads=1)
        )
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(application(config, min_replicas=2), name="lmkit", route_prefix="/")
        yield f"http://127.0.0.1:{port}"
        with warnings.catch_warnings():  # Ray leaves its processes to the system
            warnings.simplefilter("ignore", ResourceWarning)
            serve.shutdown()
            ray.shutdown()
            gc.collect()

    @staticmethod
    def ask(url: str, question: str, **more: Any) -> httpx.Response:
        body = {"model": "demo", "messages": [{"role": "user", "content": question}], "temperature": 0, **more}
        return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)

    def test_answers(self, url: str) -> None:
        whole = self.ask(url, "What is 17 + 25?").json()["choices"][0]["message"]["content"]
        assert whole == "17 + 25 = 42"
        lines = self.ask(url, "What is 17 + 25?", stream=True).text.split("\n\n")
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == whole
        assert len(events) > 3
        refused = self.ask(url, "x", max_tokens=-1)
        assert refused.status_code == 400
        assert "max_tokens" in refused.text
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "demo"

    def test_an_engine_that_is_killed_under_load(self, url: str) -> None:
        """What was begun may break off; what is answered is right, and all is well again soon."""
        for _ in range(KILLS):
            sums = [(a, b) for a in range(10, 20) for b in range(20, 26)]
            with ThreadPoolExecutor(8) as threads:
                answers = [threads.submit(self.ask, url, f"What is {a} + {b}?") for a, b in sums]
                os.kill(engines()[0], signal.SIGKILL)
                found = [answer.result() for answer in answers]
            for (a, b), answer in zip(sums, found, strict=True):
                if answer.status_code == 200:
                    assert answer.json()["choices"][0]["message"]["content"] == f"{a} + {b} = {a + b}"
                else:
                    assert answer.status_code in (500, 503)
            until = monotonic() + 120
            while monotonic() < until and not (
                self.ask(url, "What is 17 + 25?").status_code == 200 and len(engines()) == 2
            ):
                sleep(0.5)
            assert len(engines()) == 2


def engines() -> list[int]:
    """Engine processes of this test's replicas."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            parent = int(path.with_name("stat").read_text().rpartition(")")[2].split()[1])
            inside = b"ray::" in Path(f"/proc/{parent}/cmdline").read_bytes()
        except (OSError, ValueError, IndexError):
            continue
        if b"lmkit.engine.process" in words and inside and _of_this_cluster(parent):
            found.append(int(path.parent.name))
    return found


def _of_this_cluster(pid: int) -> bool:
    """Whether the process works in the folder of this cluster's session."""
    session = ray._private.worker.global_worker.node.get_session_dir_path()
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return any(session.encode() in word for word in words) or session in os.readlink(f"/proc/{pid}/fd/1")
