"""The Ollama client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import ollama
import pytest

SUM = [{"role": "user", "content": "What is 12 + 30?"}]
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def client(url: str) -> ollama.Client:
    return ollama.Client(host=url)


def test_chat(client: ollama.Client) -> None:
    answer = client.chat("demo", SUM, options=GREEDY)
    assert "42" in answer.message.content
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert answer.prompt_eval_count > 0


def test_chat_streamed(client: ollama.Client) -> None:
    whole = client.chat("demo", SUM, options=GREEDY).message.content
    *parts, last = client.chat("demo", SUM, options=GREEDY, stream=True)
    assert "".join(part.message.content for part in [*parts, last]) == whole
    assert last.done


def test_chat_asynchronous(url: str) -> None:
    async def asked() -> str:
        client = ollama.AsyncClient(host=url)
        return "".join([part.message.content async for part in await client.chat("demo", SUM, stream=True)])

    assert asyncio.run(asked())


@pytest.mark.parametrize("stream", [False, True])
def test_tools(client: ollama.Client, weather: dict[str, Any], stream: bool) -> None:
    messages = [{"role": "user", "content": "What is the weather in Berlin?"}]
    tools = [{"type": "function", "function": weather}]
    answer = client.chat("demo", messages, tools=tools, options=GREEDY, stream=stream)
    parts = list(answer) if stream else [answer]
    (call,) = [call for part in parts for call in part.message.tool_calls or ()]
    assert (call.function.name, dict(call.function.arguments)) == ("get_weather", {"city": "Berlin"})
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_name": "get_weather", "content": '{"temperature": 21}'}
    assert client.chat("demo", [*messages, said, result], tools=tools, options=GREEDY).message.content


def test_thinking(client: ollama.Client) -> None:
    answer = client.chat("demo", SUM, options=GREEDY, think=True)
    assert answer.message.thinking
    assert "42" in answer.message.content


def test_schema(client: ollama.Client) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
              "required": ["name", "age"]}  # fmt: skip
    text = 'Write JSON with the keys "name" and "age" for Anna, who is 31.'
    answer = client.chat("demo", [{"role": "user", "content": text}], format=schema, options=GREEDY)
    assert set(json.loads(answer.message.content)) == {"name", "age"}


@pytest.mark.parametrize("stream", [False, True])
def test_generate(client: ollama.Client, stream: bool) -> None:
    answer = client.generate("demo", "What is lmkit?", options=GREEDY | {"num_predict": 40}, stream=stream)
    text = "".join(part.response for part in answer) if stream else answer.response
    assert "language models" in text


def test_models(client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == ["demo"]
    assert [model.model for model in client.ps().models] == ["demo"]
    assert "completion" in client.show("demo").capabilities


def test_embed(embed_url: str) -> None:
    client = ollama.Client(host=embed_url)
    first, second = client.embed("demo", ["a sum", "a city"]).embeddings
    assert len(first) == len(second) == 256
    assert len(client.embeddings("demo", "a sum").embedding) == 256


def test_errors(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="nosuch") as found:
        client.chat("nosuch", SUM)
    assert found.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="pull"):
        client.pull("demo")
