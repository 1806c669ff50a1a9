"""llama-index with its OpenAI-like model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

SUM = [ChatMessage(role="user", content="What is 12 + 30?")]


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def llm(url: str) -> OpenAILike:
    return OpenAILike(
        model="demo", api_base=f"{url}/v1", api_key="none", is_chat_model=True, is_function_calling_model=True,
        temperature=0.0, max_tokens=200, context_window=2048, max_retries=0, should_use_structured_outputs=True,
    )  # fmt: skip


def test_chat(llm: OpenAILike) -> None:
    answer = llm.chat(SUM)
    assert "42" in answer.message.content
    again = [*SUM, answer.message, ChatMessage(role="user", content="What is 20 + 3?")]
    assert "23" in llm.chat(again).message.content


def test_chat_streamed(llm: OpenAILike) -> None:
    *_, last = llm.stream_chat(SUM)
    assert last.message.content == llm.chat(SUM).message.content


def test_chat_asynchronous(llm: OpenAILike) -> None:
    async def asked() -> str:
        return "".join([part.delta or "" async for part in await llm.astream_chat(SUM)])

    assert "42" in asyncio.run(asked())


def test_completions(url: str) -> None:
    llm = OpenAILike(model="demo", api_base=f"{url}/v1", api_key="none", is_chat_model=False, temperature=0.0)
    whole = llm.complete("Hello", max_tokens=8).text
    assert "".join(part.delta or "" for part in llm.stream_complete("Hello", max_tokens=8)) == whole


@pytest.mark.parametrize("stream", [False, True])
def test_tools(llm: OpenAILike, stream: bool) -> None:
    def get_weather(city: str) -> str:
        """Get the current weather in a city"""
        return "sunny"

    given: Any = {"tools": [FunctionTool.from_defaults(get_weather)], "user_msg": "What is the weather in Berlin?"}
    if stream:
        *_, answer = llm.stream_chat_with_tools(**given)
    else:
        answer = llm.chat_with_tools(**given)
    (call,) = llm.get_tool_calls_from_response(answer)
    assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": "Berlin"})


def test_structured(llm: OpenAILike) -> None:
    text = 'Write JSON with the keys "name" and "age" for Anna, who is 31.'
    answer = llm.as_structured_llm(Person).chat([ChatMessage(role="user", content=text)])
    assert isinstance(answer.raw, Person)
