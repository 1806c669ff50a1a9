"""The same ask through every door: LLM, AsyncLLM, HTTP whole and HTTP streamed answer alike, and refuse alike."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
import pytest_asyncio
from lmkit import LLM, AsyncLLM
from lmkit.api import LmkitError, ToolChoice
from lmkit.config import from_options
from lmkit.text.stream import Finish, OutputEvent
from lmkit_http.app import build_app
from lmkit_python.outputs import Completion

pytestmark = pytest.mark.asyncio(loop_scope="module")  # two engines for all
OPTIONS: dict[str, Any] = {"max_length": 256, "kv_memory": "8MiB", "threads": 1}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
TEXTS = ("Hello", "What is 2 + 3?", "Wie geht's dir?", " ", "List three colours")
NUM = 40


def words(source: random.Random) -> str:
    return " ".join(source.choice(TEXTS) for _ in range(source.randint(1, 3)))


def random_params(source: random.Random) -> dict[str, Any]:
    params: dict[str, Any] = {"max_tokens": source.randint(1, 8), "seed": source.choice([0, 7, (1 << 63) - 1])}
    choices: dict[str, list[Any]] = {
        "temperature": [0.0, 1.0], "stop": [["e"], ["zzz"]], "top_k": [5], "min_tokens": [1], "ignore_eos": [True],
        "repetition_penalty": [1.3],
    }  # fmt: skip
    for name, values in choices.items():
        if source.random() < 0.3:
            params[name] = source.choice(values)
    return params


def random_chat(source: random.Random) -> dict[str, Any]:
    """Arguments of a conversation as HTTP has them; some are wrong."""
    content = words(source)
    user: Any = source.choice([content, content, [{"type": "text", "text": content}], [{"type": "text"}]])
    messages: list[dict[str, Any]] = [{"role": "user", "content": user}]
    if source.random() < 0.3:
        messages.insert(0, {"role": source.choice(["system", "developer"]), "content": "Be brief."})
    chat: dict[str, Any] = {"messages": messages, "n": source.choice([1, 1, 3])}
    if source.random() < 0.3:
        messages.append({"role": "assistant", "content": source.choice(["It is", "<think>\nso", ""])})
        chat["continue_final_message"] = True
        if source.random() < 0.2:
            messages.pop()
    if source.random() < 0.2:
        chat["tools"] = source.choice([[TOOL], [TOOL, TOOL]])
        chat["tool_choice"] = source.choice(["auto", "none", "required", "f", "g"])
    if source.random() < 0.1:
        chat["tool_choice"] = "required"
    if source.random() < 0.1:
        messages[0]["content"] = "too long " * 200
    return chat


def shown(completion: Completion) -> tuple[Any, ...]:
    called = completion.tool_calls and completion.finish_reason == "stop"
    return (
        completion.text,
        completion.reasoning,
        [(call.name, call.arguments) for call in completion.tool_calls],
        "tool_calls" if called else completion.finish_reason,
        completion.stop,
    )


def named(choice: str) -> str | ToolChoice:
    return choice if choice in ("auto", "none", "required") else ToolChoice("named", choice)


def python_arguments(ask: dict[str, Any]) -> dict[str, Any]:
    found = dict(ask)
    if "tool_choice" in found:
        found["tool_choice"] = named(found["tool_choice"])
    return found


def http_body(ask: dict[str, Any]) -> dict[str, Any]:
    found = dict(ask)
    choice = found.get("tool_choice")
    if choice is not None and choice not in ("auto", "none", "required"):
        found["tool_choice"] = {"type": "function", "function": {"name": choice}}
    return found


class Doors:
    """Each gives (content, reasoning, calls, finish reason, stop) per choice, or "refused"."""

    def __init__(self, llm: LLM, llm_async: AsyncLLM, http: httpx.AsyncClient) -> None:
        self.llm, self.llm_async, self.http = llm, llm_async, http

    async def python(self, path: str, ask: dict[str, Any], params: dict[str, Any]) -> Any:
        arguments = python_arguments(ask)
        call: Any = self.llm.chat if "chat" in path else self.llm.generate
        return self._answer(lambda: call(**arguments, params=self.llm.default_params(**params)))

    async def asynchronous(self, path: str, ask: dict[str, Any], params: dict[str, Any]) -> Any:
        call: Any = self.llm_async.chat if "chat" in path else self.llm_async.generate
        try:
            outputs = await call(**python_arguments(ask), params=self.llm_async.default_params(**params))
        except LmkitError as error:
            return ("refused", error.status)
        return [shown(one) for output in outputs for one in output.outputs]

    @staticmethod
    def _answer(call: Callable[[], Any]) -> Any:
        try:
            return [shown(one) for output in call() for one in output.outputs]
        except LmkitError as error:
            return ("refused", error.status)

    async def whole(self, path: str, ask: dict[str, Any], params: dict[str, Any]) -> Any:
        response = await self.http.post(path, json=as_http(path, ask, params))
        if response.status_code != 200:
            return ("refused", response.status_code)
        return [self._choice(choice) for choice in response.json()["choices"]]

    @staticmethod
    def _choice(choice: dict[str, Any]) -> tuple[Any, ...]:
        end = (choice["finish_reason"], choice["stop_reason"])
        if "text" in choice:
            return (choice["text"], "", [], *end)
        message = choice["message"]
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
        return (message["content"] or "", message.get("reasoning_content", ""), calls, *end)

    async def streamed(self, path: str, ask: dict[str, Any], params: dict[str, Any]) -> Any:
        response = await self.http.post(path, json=as_http(path, ask, params) | {"stream": True})
        if response.status_code != 200:
            return ("refused", response.status_code)
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        sums: dict[int, list[Any]] = {}
        for line in lines:
            for choice in json.loads(line)["choices"]:
                total = sums.setdefault(choice["index"], ["", "", [], None, None])
                delta = choice.get("delta") or {"content": choice.get("text", "")}
                total[0] += delta.get("content", "")
                total[1] += delta.get("reasoning_content", "")
                for call in delta.get("tool_calls", ()):
                    if "id" in call:
                        total[2].append([call["function"]["name"], ""])
                    total[2][call["index"]][1] += call["function"].get("arguments", "")
                if choice["finish_reason"] is not None:
                    total[3:] = choice["finish_reason"], choice["stop_reason"]
        return [(t[0], t[1], [tuple(c) for c in t[2]], t[3], t[4]) for _, t in sorted(sums.items())]


def as_http(path: str, ask: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    body = http_body(ask) | params
    if "prompts" in body:
        body["prompt"] = body.pop("prompts")
    return body


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def doors() -> AsyncIterator[Doors]:
    llm_async = await AsyncLLM.start(from_options({"model": "demo", **OPTIONS}))
    transport = httpx.ASGITransport(build_app(llm_async), raise_app_exceptions=False)
    async with llm_async, httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        with LLM("demo", **OPTIONS) as llm:
            yield Doors(llm, llm_async, http)


async def test_every_door_answers_alike(doors: Doors) -> None:
    source = random.Random(12)
    refused = answered = 0
    for _ in range(NUM):
        params = random_params(source)
        if source.random() < 0.3:
            path, ask = "/v1/completions", {"prompts": source.choice([words(source), [5, 6, 7], [words(source)] * 2])}
            ask["n"] = source.choice([1, 2])
        else:
            path, ask = "/v1/chat/completions", random_chat(source)
        ways = (doors.python, doors.asynchronous, doors.whole, doors.streamed)
        answers = [await way(path, ask, params) for way in ways]
        assert answers[1:] == answers[:-1], (path, ask, params)
        refused, answered = refused + (answers[0][0] == "refused"), answered + (answers[0][0] != "refused")
    assert min(refused, answered) >= NUM // 8


async def test_asynchronous_streams_are_what_chat_says(doors: Doors) -> None:
    params = doors.llm.default_params(temperature=0.0, max_tokens=8)
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    streamed = [untimed(event) async for event in doors.llm_async.stream_chat(messages, params)]
    assert streamed == [untimed(event) for event in doors.llm.stream_chat(messages, params)]
    texts = [untimed(event) async for event in doors.llm_async.stream("Hello", params)]
    assert texts == [untimed(event) for event in doors.llm.stream("Hello", params)]


def untimed(event: OutputEvent) -> OutputEvent:
    """The same without the seconds that it took."""
    return replace(event, usage=replace(event.usage, started=None)) if isinstance(event, Finish) else event
