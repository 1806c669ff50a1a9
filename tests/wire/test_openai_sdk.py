"""The official Python client over a real socket: what its users see, exactly as scripted."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from lmkit_http.settings import ServerSettings
from lmkit_testing.serving import hashed, listening, scripted

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "the weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = (
    "<think>the user asks\nfor é</think>"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 😀"}}\n</tool_call>'
)
HELLO = [{"role": "user", "content": "How is the weather?"}]


def connect(url: str, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


async def test_streamed_tool_call_with_reasoning_and_the_next_turn() -> None:
    llm = scripted(CALL, "It is sunny.")
    async with listening(llm) as url, connect(url) as client:
        stream = await client.chat.completions.create(
            model="scripted", messages=HELLO, tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
        reasoning, content, name, arguments, finish, usage, ids = "", "", "", "", None, None, set()
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                reasoning += getattr(choice.delta, "reasoning_content", None) or ""
                content += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    ids |= {call.id} if call.id else set()
                    name += call.function.name or ""
                    arguments += call.function.arguments or ""
                finish = choice.finish_reason or finish
        num_requests = len(llm.client.requests)  # type: ignore[attr-defined]
        assert (reasoning, content, name, num_requests) == ("the user asks\nfor é", "", "get_weather", 1)
        assert json.loads(arguments) == {"city": "Zürich 😀"}
        assert finish == "tool_calls"
        assert usage is not None
        assert usage.completion_tokens_details.reasoning_tokens > 0
        assert len(ids) == 1

        whole = await client.chat.completions.create(model="scripted", messages=HELLO, tools=TOOLS)
        assert whole.choices[0].message.content == "It is sunny."


async def test_the_answer_can_be_sent_back() -> None:
    """As agents do: the message object of the SDK, and the tool's result."""
    llm = scripted(CALL, "It is sunny.")
    async with listening(llm) as url, connect(url) as client:
        first = await client.chat.completions.create(model="scripted", messages=HELLO, tools=TOOLS)
        message = first.choices[0].message
        assert message.tool_calls is not None
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
        for history in (message, message.model_dump(), message.model_dump(exclude_none=True)):
            second = await client.chat.completions.create(
                model="scripted", messages=[*HELLO, history, result], tools=TOOLS
            )
            assert second.choices[0].finish_reason in ("stop", "tool_calls")
        prompt = llm.text.tokenizer.decode(llm.client.requests[-1].token_ids)  # type: ignore[attr-defined]
        assert '"arguments": {"city": "Zürich 😀"}' in prompt  # an object again, not a string


async def test_stream_helper() -> None:
    async with listening(scripted("Hello there")) as url, connect(url) as client:
        async with client.chat.completions.stream(model="scripted", messages=HELLO) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == "Hello there"


async def test_completions_and_models() -> None:
    async with listening(scripted("abc")) as url, connect(url) as client:
        answer = await client.completions.create(model="scripted", prompt=["x", "y"], logprobs=1, echo=True)
        assert [c.text for c in answer.choices] == ["xabc", "yabc"]
        assert answer.choices[0].logprobs is not None
        parts = [c async for c in await client.completions.create(model="scripted", prompt="x", stream=True)]
        assert "".join(p.choices[0].text for p in parts) == "abc"
        models = await client.models.list()
        assert [m.id for m in models.data] == ["scripted"]
        assert (await client.models.retrieve("scripted")).id == "scripted"


async def test_errors_are_typed() -> None:
    settings = ServerSettings(port=0, api_keys=("secret",))
    async with listening(scripted("abc"), settings) as url, connect(url, "wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
        good = client.with_options(api_key="secret")
        with pytest.raises(openai.NotFoundError, match="there is no model"):
            await good.chat.completions.create(model="other", messages=HELLO)
        with pytest.raises(openai.BadRequestError, match="there is no tool 'g'") as caught:
            await good.chat.completions.create(
                model="scripted", messages=HELLO,
                tools=[{"type": "function", "function": {"name": "f"}}],
                tool_choice={"type": "function", "function": {"name": "g"}},
            )  # fmt: skip
        assert caught.value.param == "tool_choice"
        with pytest.raises(openai.BadRequestError, match="Send structured_outputs"):
            await good.chat.completions.create(model="scripted", messages=HELLO, extra_body={"guided_regex": "a"})


async def test_death_in_mid_stream_raises() -> None:
    llm = scripted("x" * 1000, delay=0.002)
    async with listening(llm) as url, connect(url) as client:
        stream = await client.chat.completions.create(model="scripted", messages=HELLO, stream=True)
        asyncio.get_running_loop().call_later(0.1, llm.client.kill)  # type: ignore[attr-defined]
        with pytest.raises(openai.APIError, match="not running"):
            [chunk async for chunk in stream]


async def test_leaving_the_stream_aborts() -> None:
    async with hashed(delay=0.002) as llm, listening(llm) as url, connect(url) as client:
        stream = await client.chat.completions.create(
            model="hash-model", messages=HELLO, stream=True, max_tokens=3000, extra_body={"ignore_eos": True}
        )
        async for i, _ in _numbered(stream):
            if i == 3:
                break
        await stream.close()
        for _ in range(200):
            stats = (await llm.client.stats()).sched
            if not stats.num_running and stats.num_free_blocks == stats.num_blocks:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("blocks are still held")


async def _numbered(stream):  # type: ignore[no-untyped-def]
    i = 0
    async for item in stream:
        yield i, item
        i += 1
