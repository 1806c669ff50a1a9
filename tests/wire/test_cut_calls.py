"""A tool call that is cut never reaches a client as a complete one: every dialect, whole and streamed, every end.

The model's answer is scripted, and cut at many places: by the limit of tokens, by the model's own end, by a stop text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import anthropic
import httpx
import openai
import pytest
from lmkit_formats import ToolFormat
from lmkit_http.app import build_app
from lmkit_testing.serving import CALLS, ServedLLM, listening, scripted, text_side
from lmkit_tool_parser_gemma.formats import GEMMA4
from lmkit_tool_parser_lfm.formats import LFM2
from lmkit_tool_parser_qwen.formats import QWEN3_CODER

ARGUMENTS = {"command": "rm -rf /data/work/STOP/old", "force": True}
SCHEMA = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "force": {"type": "boolean"}},
    "required": ["command"],
}
FUNCTION = {"name": "run", "description": "a command", "parameters": SCHEMA}
FORMATS = {"json": CALLS, "xml": QWEN3_CODER, "python": LFM2, "loose": GEMMA4}
ENDS = ("length", "end", "stop")


class Seen(NamedTuple):
    """What a client has of an answer: its text, the calls that it could execute, the reason of the end."""

    text: str
    calls: list[tuple[str, Any]]
    reason: str


def answer(fmt: ToolFormat) -> str:
    return "Well. " + fmt.write([("run", ARGUMENTS)])


def cuts(text: str) -> Iterator[int]:
    """Places in the text of a call, each as the number of tokens (bytes) before it."""
    begin = text.index("run")
    yield from range(begin, len(text), 7)
    yield text.index("STOP")


def served(fmt: ToolFormat, *scripts: str) -> ServedLLM:
    """A model that ends by itself, unless the limit of tokens comes before."""
    return replace(scripted(*scripts), text=text_side(fmt))


@asynccontextmanager
async def connected(llm: ServedLLM) -> Any:
    transport = httpx.ASGITransport(build_app(llm), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


def executable(arguments: str) -> Any:
    """The arguments as a client reads them; None when it cannot."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return None


def data(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    lines = answer.text.splitlines()
    found = [line.removeprefix("data: ") for line in lines if line.startswith(("data: {", "{"))]
    return [json.loads(line) for line in found]


async def chat(client: httpx.AsyncClient, stream: bool, limit: int, stop: list[str]) -> Seen:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": FUNCTION}],
            "max_tokens": limit, "stream": stream, "stop": stop, "stop_in": "output"}  # fmt: skip
    got = await client.post("/v1/chat/completions", json=body)
    text, calls, reason = "", [], ""
    for part in data(got):
        choice = part["choices"][0]
        message = choice["delta" if stream else "message"]
        text += message.get("content") or ""
        for number, call in enumerate(message.get("tool_calls") or ()):
            if "id" in call:
                assert call["function"]["arguments"], "clients take empty arguments for an empty object"
                calls.append([call["function"]["name"], ""])
            calls[call.get("index", number)][1] += call["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    found = [(name, executable(arguments)) for name, arguments in calls]
    if any(arguments is None for _, arguments in found):
        assert reason != "tool_calls"
    return Seen(text, [call for call in found if call[1] is not None], reason)


async def messages(client: httpx.AsyncClient, stream: bool, limit: int, stop: list[str]) -> Seen:
    tool = {"name": "run", "input_schema": SCHEMA}
    body = {"model": "scripted", "messages": [{"role": "user", "content": "x"}], "tools": [tool], "max_tokens": limit,
            "stream": stream, "stop_sequences": stop, "stop_in": "output"}  # fmt: skip
    got = await client.post("/v1/messages", json=body)
    if not stream:
        blocks, reason = got.json()["content"], got.json()["stop_reason"]
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        return Seen(text, [(b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"], reason)
    text, inputs, names, reason = "", [], [], ""
    for event in data(got):
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            names.append(event["content_block"]["name"])
            inputs.append("")
        delta = event.get("delta", {})
        text += delta.get("text", "")
        if "partial_json" in delta:
            inputs[-1] += delta["partial_json"]
        reason = delta.get("stop_reason") or reason
    return Seen(text, [(name, json.loads(value)) for name, value in zip(names, inputs, strict=True)], reason)


async def ollama(client: httpx.AsyncClient, stream: bool, limit: int, stop: list[str]) -> Seen:
    options = {"num_predict": limit, "stop": stop, "stop_in": "output"}
    body = {"model": "scripted", "messages": [{"role": "user", "content": "x"}], "stream": stream, "options": options,
            "tools": [{"type": "function", "function": FUNCTION}]}  # fmt: skip
    text, calls, reason = "", [], ""
    for line in data(await client.post("/api/chat", json=body)):
        text += line["message"]["content"]
        calls += [(c["function"]["name"], c["function"]["arguments"]) for c in line["message"].get("tool_calls", ())]
        reason = line.get("done_reason", reason)
    return Seen(text, calls, reason)


async def responses(client: httpx.AsyncClient, stream: bool, limit: int, stop: list[str]) -> Seen:
    body = {"input": "x", "tools": [{"type": "function", **FUNCTION}], "stream": stream, "max_output_tokens": limit}
    got = await client.post("/v1/responses", json=body)
    final = data(got)[-1]["response"] if stream else got.json()
    items = final["output"]
    text = "".join(item["content"][0]["text"] for item in items if item["type"] == "message")
    calls = []
    for item in items:
        if item["type"] == "function_call":
            arguments = executable(item["arguments"])
            assert (item["status"] == "completed") == (arguments is not None), item
            calls += [(item["name"], arguments)] if arguments is not None else []
    if stream:
        done = [event["item"] for event in data(got) if event["type"] == "response.output_item.done"]
        assert done == items
    return Seen(text, calls, final["status"])


DIALECTS = {"chat": chat, "messages": messages, "ollama": ollama, "responses": responses}
LIMITS = {"chat": "length", "messages": "max_tokens", "ollama": "length", "responses": "incomplete"}
STOPS = {"chat": {"stop"}, "messages": {"end_turn", "stop_sequence"}, "ollama": {"stop"}, "responses": {"completed"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", FORMATS)
async def test_a_cut_call_is_not_executable(name: str, dialect: str, stream: bool) -> None:
    fmt, ask = FORMATS[name], DIALECTS[dialect]
    written = answer(fmt)
    trials = [(at, end) for at in cuts(written) for end in ENDS]
    at_stop = written.index("STOP")
    trials = [(at, end) for at, end in trials if end != "stop" or (at == at_stop and dialect != "responses")]
    scripts = [written[:at] if end == "end" else written for at, end in trials]
    async with connected(served(fmt, written, *scripts)) as client:
        whole = await ask(client, stream, 2000, [])
        assert whole.calls == [("run", ARGUMENTS)]
        assert whole.reason in ("tool_calls", "tool_use", "stop", "completed")
        for at, end in trials:
            limit, stop = at if end == "length" else 2000, ["STOP"] if end == "stop" else []
            seen = await ask(client, stream, limit, stop)
            where = f"{end} at {at}: {written[:at]!r}"
            if seen.calls:
                assert seen.calls == whole.calls, where
            else:
                assert seen.reason in ({LIMITS[dialect]} if end == "length" else STOPS[dialect]), where
                assert seen.text.startswith("Well."), where


@pytest.mark.parametrize("stream", [False, True])
async def test_text_of_a_cut_call_comes_back_where_arguments_must_be_objects(stream: bool) -> None:
    written = answer(CALLS)[: answer(CALLS).index("STOP")]
    for ask in (messages, ollama):
        async with connected(served(CALLS, written)) as client:
            assert (await ask(client, stream, 2000, [])).text == written


async def test_a_whole_call_before_a_cut_one_does_not_make_the_answer_one_of_calls() -> None:
    script = CALLS.write([("run", ARGUMENTS)]) + "\n" + CALLS.write([("run", ARGUMENTS)])
    reasons = []
    for ask in (chat, messages):
        async with connected(served(CALLS, script[:-30])) as client:
            for stream in (False, True):
                seen = await ask(client, stream, 2000, [])
                assert seen.calls == [("run", ARGUMENTS)]
                reasons.append(seen.reason)
    assert reasons == ["stop", "stop", "end_turn", "end_turn"]


async def test_anthropics_client_gets_no_input_that_it_could_complete() -> None:
    """It completes JSON that is cut, so no piece of a cut call may reach it as one."""
    written = answer(CALLS)
    asked: Any = {"model": "scripted", "messages": [{"role": "user", "content": "x"}],
                  "tools": [{"name": "run", "input_schema": SCHEMA}]}  # fmt: skip
    async with (
        listening(served(CALLS, written)) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        for at in cuts(written):
            async with client.messages.stream(**asked, max_tokens=at) as stream:
                final = await stream.get_final_message()
            assert final.stop_reason == "max_tokens"
            assert all(block.type == "text" or block.input == ARGUMENTS for block in final.content), at
        async with client.messages.stream(**asked, max_tokens=2000) as stream:
            final = await stream.get_final_message()
        assert (final.content[-1].input, final.stop_reason) == (ARGUMENTS, "tool_use")


async def test_openais_client_is_told_the_true_end() -> None:
    written = answer(CALLS)
    asked: Any = {"model": "scripted", "messages": [{"role": "user", "content": "x"}],
                  "tools": [{"type": "function", "function": FUNCTION}]}  # fmt: skip
    async with (
        listening(served(CALLS, written)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        at = written.index("STOP")
        async with client.chat.completions.stream(**asked) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].finish_reason == "tool_calls"
        with pytest.raises(openai.LengthFinishReasonError):
            async with client.chat.completions.stream(**asked, max_tokens=at) as stream:
                await stream.get_final_completion()
        whole = await client.chat.completions.create(**asked, max_tokens=at)
        (call,) = whole.choices[0].message.tool_calls
        assert call.function.arguments == '{"command": "rm -rf /data/work/'
        assert whole.choices[0].finish_reason == "length"


async def test_a_custom_tool_gets_no_input_that_was_cut() -> None:
    """Its input is a text: any part of it could be executed."""
    script = CALLS.write([("shell", {"input": "rm -rf /data/work/old"})])
    tool = {"type": "custom", "name": "shell", "description": "a command"}
    places = range(script.index("shell"), len(script), 5)
    async with connected(served(CALLS, *(script[:at] for at in places for _ in range(2)))) as client:
        for at in places:
            for stream in (False, True):
                got = await client.post("/v1/responses", json={"input": "x", "tools": [tool], "stream": stream})
                final = data(got)[-1]["response"] if stream else got.json()
                inputs = [item["input"] for item in final["output"] if item["type"] == "custom_tool_call"]
                assert inputs in ([], ["rm -rf /data/work/old"]), script[:at]
