"""Answers that outlive the engine, and probes that tell of an engine that does not answer."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import httpx
from lmkit_testing.serving import ServedLLM, listening, supervised

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True, "max_tokens": 300, "temperature": 0}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
LASTING = [
    (CHAT, HELLO | USAGE | {"logprobs": True, "top_logprobs": 1}),
    (CHAT, HELLO | {"temperature": 1, "seed": 7}),
    (CHAT, HELLO | USAGE | {"temperature": 1, "seed": 7, "n": 3, "resume": True}),
    (
        COMPLETIONS,
        USAGE | {"prompt": "abc", "max_tokens": 300, "temperature": 0, "stop": ["no such text"], "echo": True},
    ),
    (COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 300, "temperature": 0, "ignore_eos": True, "prompt_logprobs": 1}),
]
CUT = [
    (CHAT, HELLO | USAGE | {"resume": False}),
    (CHAT, HELLO | {"temperature": 1}),
    (CHAT, HELLO | {"temperature": 1, "seed": 3, "n": 2}),
]


async def until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


def said(response: httpx.Response) -> Any:
    """The answer without what differs from request to request."""
    text = re.sub(r'"(id|created|cached_tokens)": ?("[^"]*"|[0-9]+)', r'"\1":0', response.text)
    if "data:" not in text:
        return json.loads(text)
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    parts: dict[object, list[Any]] = {}  # by choice: the order among choices is of no meaning
    for chunk in chunks:
        for choice in chunk["choices"] or [{"usage": chunk["usage"]}]:
            parts.setdefault(choice.get("index"), []).append(choice)
    return {index: _joined(found) for index, found in parts.items()}


def _joined(choices: list[Any]) -> Any:
    """Steps of several tokens are cut in other places: what matters is what they say together."""
    texts = [c.get("text") or (c.get("delta") or {}).get("content") or "" for c in choices]
    logprobs = [entry for c in choices for entry in ((c.get("logprobs") or {}).get("content") or [])]
    return "".join(texts), logprobs, choices[-1].get("finish_reason"), choices[-1].get("usage")


async def pid_of(llm: ServedLLM) -> int:
    client: Any = llm.client
    await until(lambda: client.state == "ready")
    return client.client.pid


async def test_answers_go_on_when_the_engine_dies() -> None:
    async with (
        supervised(delay=0.003) as llm,
        listening(llm) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        client_of: Any = llm.client
        whole = await asyncio.gather(*(client.post(path, json=body) for path, body in LASTING))
        tasks = [asyncio.ensure_future(client.post(path, json=body)) for path, body in LASTING]
        cut = [asyncio.ensure_future(client.post(path, json=body)) for path, body in CUT]
        await until(lambda: len(client_of.client._streams) >= 11)
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in tasks)
        os.kill(await pid_of(llm), signal.SIGKILL)
        for before, after in zip(whole, await asyncio.gather(*tasks), strict=True):
            assert after.status_code == 200
            assert said(after) == said(before)
        for response in await asyncio.gather(*cut):
            assert "engine-dead" in response.text
        stats = await llm.client.stats()
        assert (stats.sched.num_running, stats.sched.num_free_blocks) == (0, stats.sched.num_blocks)


async def test_probes_and_metrics_agree_about_an_engine_that_was_stopped() -> None:
    async with supervised(delay=0.001) as llm, listening(llm) as url, httpx.AsyncClient(base_url=url) as client:

        async def ready() -> tuple[int, bool]:
            metrics = (await client.get("/metrics")).text
            return (await client.get("/ready")).status_code, 'lmkit_engine_up{model_name="hash-model"} 1.0' in metrics

        await client.post(CHAT, json=HELLO | {"max_tokens": 3})
        assert await ready() == (200, True)
        pid = await pid_of(llm)
        os.kill(pid, signal.SIGSTOP)
        try:
            stopped = time.perf_counter()
            while (await ready())[0] == 200:
                assert time.perf_counter() - stopped < 30  # it takes about one second
            assert await ready() == (503, False)
            assert (await client.get("/live")).status_code == 200
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: llm.client.responsive)
        assert await ready() == (200, True)
