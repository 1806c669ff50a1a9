"""pydantic-ai by chat, Responses and Messages."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(params=["chat", "responses", "messages"])
def model(url: str, request: pytest.FixtureRequest) -> Any:
    if request.param == "messages":
        return AnthropicModel("demo", provider=AnthropicProvider(base_url=url, api_key="none"))
    kind = OpenAIChatModel if request.param == "chat" else OpenAIResponsesModel
    return kind("demo", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))


def agent(model: Any, **more: Any) -> Agent[None, Any]:
    return Agent(model, model_settings={"temperature": 0.0, "max_tokens": 200}, **more)


def test_run_and_history(model: Any) -> None:
    first = agent(model).run_sync("What is 12 + 30?")
    assert "42" in first.output
    assert first.usage.output_tokens > 0
    second = agent(model).run_sync("What is 20 + 3?", message_history=first.all_messages())
    assert "23" in second.output


def test_streamed(model: Any) -> None:
    async def asked() -> str:
        async with agent(model).run_stream("What is 12 + 30?") as result:
            return "".join([text async for text in result.stream_text(delta=True)])

    assert asyncio.run(asked()) == agent(model).run_sync("What is 12 + 30?").output


@pytest.mark.parametrize("stream", [False, True])
def test_tools(model: Any, stream: bool) -> None:
    asked = []

    def get_weather(city: str) -> str:
        """Get the current weather in a city"""
        asked.append(city)
        return '{"temperature": 21}'

    async def streamed() -> str:
        async with agent(model, tools=[get_weather]).run_stream("What is the weather in Berlin?") as result:
            return str(await result.get_output())

    if stream:
        assert asyncio.run(streamed())
    else:
        assert agent(model, tools=[get_weather]).run_sync("What is the weather in Berlin?").output
    assert asked == ["Berlin"]


def test_native_output(model: Any) -> None:
    if isinstance(model, AnthropicModel):
        pytest.skip("the client knows by the model's name whether it may ask for it")
    text = 'Write JSON with the keys "name" and "age" for Anna, who is 31.'
    assert isinstance(agent(model, output_type=NativeOutput(Person)).run_sync(text).output, Person)
