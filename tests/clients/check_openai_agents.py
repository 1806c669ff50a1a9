"""openai-agents by chat and by Responses, which is its default."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agents import (
    Agent,
    HostedMCPTool,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
KINDS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(params=KINDS)
def agent(url: str, request: pytest.FixtureRequest) -> Any:
    def made(**more: Any) -> Agent[Any]:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        settings = ModelSettings(temperature=0.0, max_tokens=200)
        model = KINDS[request.param](model="demo", openai_client=client)
        return Agent(name="a", model=model, model_settings=settings, **more)

    return made


def test_run_and_history(agent: Any) -> None:
    first = Runner.run_sync(agent(), "What is 12 + 30?")
    assert "42" in first.final_output
    again = [*first.to_input_list(), {"role": "user", "content": "What is 20 + 3?"}]
    assert "23" in Runner.run_sync(agent(), again).final_output


def test_streamed(agent: Any) -> None:
    async def asked() -> tuple[str, str]:
        result, said = Runner.run_streamed(agent(), "What is 12 + 30?"), ""
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                said += event.data.delta
        return said, result.final_output

    said, final = asyncio.run(asked())
    assert said == final
    assert "42" in final


@pytest.mark.parametrize("stream", [False, True])
def test_tools(agent: Any, stream: bool) -> None:
    cities = []

    @function_tool
    def get_weather(city: str) -> str:
        """Get the current weather in a city"""
        cities.append(city)
        return '{"temperature": 21}'

    async def asked() -> str:
        if not stream:
            return (await Runner.run(agent(tools=[get_weather]), "What is the weather in Berlin?")).final_output
        result = Runner.run_streamed(agent(tools=[get_weather]), "What is the weather in Berlin?")
        async for _ in result.stream_events():
            pass
        return result.final_output

    assert asyncio.run(asked())
    assert cities == ["Berlin"]


def test_output_type(agent: Any) -> None:
    text = 'Write JSON with the keys "name" and "age" for Anna, who is 31.'
    assert isinstance(Runner.run_sync(agent(output_type=Person), text).final_output, Person)


@pytest.mark.parametrize("stream", [False, True])
def test_hosted_mcp(url: str, stream: bool) -> None:
    """A tool of an MCP server that the server calls: one answer has the call and what follows from it."""
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = OpenAIResponsesModel(model="demo", openai_client=client)
    config: Any = {"type": "mcp", "server_label": "weather", "require_approval": "never"}
    agent = Agent(name="a", model=model, tools=[HostedMCPTool(tool_config=config)])

    async def asked() -> tuple[Any, Any]:
        if stream:
            result: Any = Runner.run_streamed(agent, "What is the weather in Berlin?")
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, "What is the weather in Berlin?")
        again = [*result.to_input_list(), {"role": "user", "content": "What is 20 + 3?"}]
        return result, await Runner.run(agent, again)

    result, later = asyncio.run(asked())
    assert result.final_output
    assert later.final_output
    (call,) = [item for item in result.raw_responses[0].output if item.type == "mcp_call"]
    assert '"temperature": 21' in call.output
