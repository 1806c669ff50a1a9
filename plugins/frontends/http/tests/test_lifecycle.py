"""Clients that leave, engines that die, servers that drain, readers that are slow (P2, P14, R1, R7, R8)."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from lmkit_http.backend import Backend
from lmkit_http.settings import ServerSettings
from lmkit_testing.serving import hashed, listening, scripted
from lmkit_tokenizer_json.render import Renderer

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True}
LONG = HELLO | {"max_completion_tokens": 2000}


async def until(check: Callable[[], Any], timeout: float = 3.0) -> None:
    end = time.monotonic() + timeout
    while True:
        value = check()
        value = await value if asyncio.iscoroutine(value) else value
        if value:
            return
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.01)


async def idle(llm: Any) -> bool:
    """No request is left and no block is held."""
    stats = (await llm.client.stats()).sched
    return not (stats.num_running or stats.num_waiting) and stats.num_free_blocks == stats.num_blocks


async def at_work(llm: Any, num: int) -> bool:
    """One request runs and the others wait."""
    stats = (await llm.client.stats()).sched
    return stats.num_running == 1 and stats.num_waiting == num - 1


def keep_backend(kept: list[Backend]) -> Callable[[Any], None]:
    return lambda app: kept.append(app.state.backend)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_frees_everything(stream: bool, n: int) -> None:
    kept: list[Backend] = []
    async with hashed(delay=0.002) as llm, listening(llm, on_app=keep_backend(kept)) as url:
        async with httpx.AsyncClient(base_url=url) as client:
            body = LONG | {"stream": stream, "n": n}
            if stream:
                async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                    assert response.status_code == 200
                    await anext(response.aiter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    await client.post("/v1/chat/completions", json=body, timeout=0.2)
        await until(lambda: idle(llm), 3.0)  # a fraction of it on an idle machine; the whole answer takes longer
        await until(lambda: not kept[0].running)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_leaves_nothing_to_the_collector(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose look at all that lives stops every stream, on a busy server for tens of milliseconds."""
    begun: list[weakref.ref[object]] = []
    begin = Backend.begin

    def note(self: Backend, exchange: Any, generation: Any, *more: Any) -> Any:
        begun.append(weakref.ref(generation))
        return begin(self, exchange, generation, *more)

    monkeypatch.setattr(Backend, "begin", note)
    async with listening(scripted("abc")) as url, httpx.AsyncClient(base_url=url) as client:
        gc.disable()
        try:
            for _ in range(3):
                assert (await client.post("/v1/chat/completions", json=HELLO | {"stream": stream})).status_code == 200
            await until(lambda: not any(reference() for reference in begun[:2]))
        finally:
            gc.enable()
        assert len(begun) == 3


async def test_a_storm_of_leaving_clients() -> None:
    async with hashed(delay=0.001) as llm, listening(llm) as url:
        async with httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=200)) as client:

            async def one(i: int) -> None:
                body = LONG | {"stream": i % 2 == 0, "seed": i}
                call = client.post("/v1/chat/completions", json=body, timeout=30)
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(call, 0.05 + 0.002 * i)

            await asyncio.gather(*(one(i) for i in range(60)))
        await until(lambda: idle(llm))


async def test_aborted_while_waiting() -> None:
    """Also a request that never got to run."""
    from lmkit.config import EngineConfig
    from lmkit.contracts.config import SchedConfig

    config = EngineConfig(sched=SchedConfig(max_rows=1))
    async with hashed(config, delay=0.002) as llm, listening(llm) as url, httpx.AsyncClient(base_url=url) as client:
        first = asyncio.create_task(client.post("/v1/chat/completions", json=LONG, timeout=30))
        await until(lambda: len(llm.client._streams) == 1)  # type: ignore[attr-defined]
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/chat/completions", json=LONG, timeout=0.2)
        first.cancel()
        await until(lambda: idle(llm))


@pytest.mark.parametrize("stream", [True, False])
async def test_death_of_the_engine_ends_every_answer(stream: bool) -> None:
    llm = scripted("x" * 2000, delay=0.002)
    async with listening(llm) as url, httpx.AsyncClient(base_url=url) as client:
        body = LONG | {"stream": stream}
        calls = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for _ in range(8)]
        await until(lambda: len(llm.client.requests) == 8)  # type: ignore[attr-defined]
        await asyncio.sleep(0.05)
        llm.client.kill()  # type: ignore[attr-defined]
        for response in await asyncio.wait_for(asyncio.gather(*calls), 10):
            if stream:
                events = [e for e in response.text.split("\n\n") if e]
                assert events[-1] == "data: [DONE]"
                assert json.loads(events[-2][6:])["error"]["code"] == "engine-dead"
            else:
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "engine-dead"
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/live")).status_code == 200
        assert 'lmkit_engine_up{model_name="scripted"} 0.0' in (await client.get("/metrics")).text
        response = await client.post("/v1/chat/completions", json=HELLO)
        assert response.status_code == 503
        assert response.headers["retry-after"]


async def test_errors_before_the_first_token_have_their_status() -> None:
    """A full queue is a 503, also with stream=true."""
    from lmkit.config import EngineConfig
    from lmkit.contracts.config import SchedConfig

    config = EngineConfig(sched=SchedConfig(max_rows=1, max_waiting=1))
    async with hashed(config, delay=0.005) as llm, listening(llm) as url, httpx.AsyncClient(base_url=url) as client:
        running = []
        for num in (1, 2):  # one computes, one waits
            running.append(asyncio.create_task(client.post("/v1/chat/completions", json=LONG, timeout=30)))
            await until(lambda num=num: at_work(llm, num))
        for stream in (True, False):
            response = await client.post("/v1/chat/completions", json=LONG | {"stream": stream})
            assert response.status_code == 503, response.text
            assert response.json()["error"]["code"] == "engine-busy"
        for task in running:
            task.cancel()


async def test_draining() -> None:
    """New requests: 503. Running ones finish. /ready is false at once."""
    llm = scripted("x" * 100, delay=0.005)
    kept: list[Backend] = []
    async with listening(llm, on_app=keep_backend(kept)) as url, httpx.AsyncClient(base_url=url) as client:
        running = asyncio.create_task(client.post("/v1/chat/completions", json=HELLO | {"stream": True}))
        await until(lambda: kept[0].num_active)
        kept[0].draining = True
        assert (await client.get("/ready")).status_code == 503
        response = await client.post("/v1/chat/completions", json=HELLO)
        assert response.status_code == 503
        assert "shutting down" in response.json()["error"]["message"]
        assert await kept[0].idle(5)
        assert (await running).text.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"length"' in (await running).text


async def test_drain_timeout_aborts_typed() -> None:
    llm = scripted("x" * 4000, delay=0.005)
    kept: list[Backend] = []
    async with listening(llm, on_app=keep_backend(kept)) as url, httpx.AsyncClient(base_url=url) as client:
        streamed = asyncio.create_task(client.post("/v1/chat/completions", json=LONG | {"stream": True, "n": 2}))
        whole = asyncio.create_task(client.post("/v1/chat/completions", json=LONG))
        await until(lambda: kept[0].num_active == 2)
        await asyncio.sleep(0.05)
        assert not await kept[0].idle(0.05)
        kept[0].abort_all()
        assert await kept[0].idle(1)
        assert '"code":"engine-busy"' in (await streamed).text
        assert (await whole).status_code == 503


async def test_a_slow_reader_delays_nobody() -> None:
    llm = scripted("x" * 3000, delay=0)
    async with listening(llm) as url, httpx.AsyncClient(base_url=url) as client:
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps(LONG | {"stream": True}).encode()
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()  # and now this client reads nothing
        await asyncio.sleep(0.1)
        begin = time.monotonic()
        response = await client.post("/v1/chat/completions", json=HELLO | {"max_completion_tokens": 50, "stream": True})
        assert response.status_code == 200
        assert time.monotonic() - begin < 30  # it takes a fraction of one; with that client waited for, no end
        writer.close()
        await until(lambda: not llm.client._streams)  # type: ignore[attr-defined]


class BrokenParser:
    """A plugin with a bug."""

    name, keep_special = "broken", frozenset()

    def start(self, prompt_tail: str, tools: Any) -> Any:
        return self

    def feed(self, text: str, ids: Any = ()) -> list[Any]:
        raise ZeroDivisionError("secret detail")

    def flush(self) -> list[Any]:
        return []


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_broken_parser_fails_its_request_only(stream: bool, n: int, caplog: pytest.LogCaptureFixture) -> None:
    llm = scripted("abc")
    broken = replace(llm.text, reasoning_format=BrokenParser())  # type: ignore[arg-type]
    app_text = lambda app: setattr(app.state.backend, "text", broken)  # noqa: E731
    async with listening(llm, on_app=app_text) as url, httpx.AsyncClient(base_url=url) as client:
        response = await client.post("/v1/chat/completions", json=HELLO | {"stream": stream, "n": n})
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "plugin"
        assert "secret" not in response.text
        assert "secret detail" in caplog.text
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        await until(lambda: not llm.client._streams)  # type: ignore[attr-defined]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("hostile", [True, False])
async def test_slow_preparation_does_not_stall_the_loop(hostile: bool) -> None:
    """A long prompt, or a template that never ends."""
    llm = scripted("ok", max_length=1 << 24)
    if hostile:
        loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        llm.text = replace(llm.text, renderer=Renderer(f"{{% if messages|length > 1 %}}{loop}{{% endif %}}", {}))
    async with listening(llm, ServerSettings(port=0)) as url, httpx.AsyncClient(base_url=url) as client:
        lags: list[float] = []

        async def watch() -> None:
            while True:
                begin = time.monotonic()
                await asyncio.sleep(0.005)
                lags.append(time.monotonic() - begin - 0.005)

        watcher = asyncio.create_task(watch())
        message = {"role": "user", "content": "word" if hostile else "word " * 40_000}
        begin = time.monotonic()
        response = await client.post("/v1/chat/completions", json={"messages": [message] * 2}, timeout=30)
        seconds = time.monotonic() - begin
        watcher.cancel()
        assert response.status_code == (400 if hostile else 200)
        assert sorted(lags)[-2] < max(0.35, seconds / 2)  # on the loop it would be nearly all; one hiccup is not ours
