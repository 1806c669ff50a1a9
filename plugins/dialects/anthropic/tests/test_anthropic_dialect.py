"""The Messages API: what templates see of a conversation, what clients see of an answer, what is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit.api import ErrorInfo
from lmkit_dialect_anthropic.conversation import Reader
from lmkit_dialect_anthropic.dialect import COUNT, MESSAGES, Anthropic
from lmkit_dialect_anthropic.schema import CountRequest
from lmkit_http.app import build_app
from lmkit_http.dialect import Incoming, Served
from lmkit_http.settings import ServerSettings
from lmkit_http.strict import parse
from lmkit_testing import Asked, DialectConformance
from lmkit_testing.serving import ServedLLM, hashed, listening, scripted, text_side

HELLO = {"model": "scripted", "max_tokens": 50, "messages": [{"role": "user", "content": "Hello"}]}
WEATHER = {
    "name": "get_weather",
    "description": "the weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = (
    "<think>the user\nasks</think>Let me see."
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
)
VERSION = {"anthropic-version": "2023-06-01"}


class TestAnthropic(DialectConformance):
    plugin = "dialect:anthropic"
    body = {"model": "scripted", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 99}
    asked = (Asked("POST /v1/messages", body, body | {"stream": True}),)

    def text(self, answer: bytes, streamed: bool) -> str:
        if not streamed:
            return "".join(block["text"] for block in json.loads(answer)["content"])
        events = [json.loads(line[6:]) for line in answer.decode().splitlines() if line.startswith("data: ")]
        return "".join(event["delta"].get("text", "") for event in events if "delta" in event)


@pytest.fixture
async def post() -> AsyncIterator[Any]:
    """post(llm, body) -> the answer of an application in memory."""

    async def ask(llm: ServedLLM, body: Any, path: str = "/v1/messages", **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(build_app(llm, options.pop("settings", None)), raise_app_exceptions=False)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", **options) as client:
            return await client.post(path, content=content)

    return ask


def messages(*given: Any, **more: Any) -> tuple[list[dict[str, Any]], set[str]]:
    """What a template sees of the messages, and what was dropped."""
    body = json.dumps({"messages": given, **more}).encode()
    reader = Reader((), set())
    return reader.messages(parse(CountRequest, body)), reader.dropped


def said_to(llm: ServedLLM, number: int) -> str:
    """The prompt of a request."""
    return llm.text.decode_all(llm.client.requests[number].token_ids)


# ---------------------------------------------------------------------------------------------- conversations


def test_a_conversation_with_calls() -> None:
    found, dropped = messages(
        {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "y"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Zürich"}},
                {"type": "tool_use", "id": "b", "name": "get_time", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "sunny"},
                {
                    "type": "tool_result",
                    "tool_use_id": "b",
                    "content": [{"type": "text", "text": "9"}],
                    "is_error": True,
                },
                {"type": "text", "text": "And?"},
            ],
        },
        system=[{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
    )
    assert found == [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "I look."}],
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'}},
                {"id": "b", "type": "function", "function": {"name": "get_time", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "sunny", "name": "get_weather"},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "9"}], "name": "get_time"},
        {"role": "user", "content": [{"type": "text", "text": "And?"}]},
    ]
    assert dropped == {
        "messages.content.cache_control", "messages.content.redacted_thinking", "messages.content.is_error",
    }  # fmt: skip


async def test_a_last_answer_is_continued(post: Any) -> None:
    llm = scripted("day")
    body = HELLO | {"messages": [*HELLO["messages"], {"role": "assistant", "content": "Good "}]}  # type: ignore[misc]
    answer = (await post(llm, body)).json()
    assert answer["content"] == [{"type": "text", "text": "day"}]
    assert said_to(llm, 0).endswith("<|assistant|>Good ")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "no images"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "no documents"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text is required"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id is required"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]}, "name"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},  # noqa: E501
            "Send the results of its calls",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "any"}},
         "web_search_20250305"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "tool", "name": "bash"}},
         "tool_choice"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema is required"),
        ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, "names the tool"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [WEATHER]}, "no tool 'g'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"mcp_servers": [{"url": "x"}]}, "send their tools"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"stop": ["x"]}, "stop_sequences"),
        ({"model": "other"}, "no model 'other'"),
    ],
    ids=str,
)  # fmt: skip
async def test_what_is_refused(post: Any, change: dict[str, Any], words: str) -> None:
    answer = await post(scripted("x"), HELLO | change)
    error = answer.json()
    assert answer.status_code == (404 if "model" in change else 400), error
    assert error["type"] == "error"
    assert words in error["error"]["message"]
    assert error["error"]["type"] == ("not_found_error" if "model" in change else "invalid_request_error")


async def test_what_changes_nothing_is_named(post: Any) -> None:
    body = HELLO | {"metadata": {"user_id": "u"}, "service_tier": "auto", "context_management": {"edits": []}}
    answer = await post(scripted("x"), body | {"mcp_servers": [], "container": None})
    assert answer.status_code == 200
    assert answer.headers["x-lmkit-warnings"] == "dropped: context_management, metadata, service_tier"
    assert answer.headers["request-id"] == answer.json()["id"]


# --------------------------------------------------------------------------------------------------- thinking


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}])
async def test_reasoning_is_shown_to_who_asked_for_it(post: Any, thinking: Any) -> None:
    answer = (await post(scripted("<think>hm</think>So."), HELLO | ({"thinking": thinking} if thinking else {}))).json()
    kinds = [block["type"] for block in answer["content"]]
    assert kinds == (["thinking", "text"] if thinking and thinking["type"] == "enabled" else ["text"])
    assert answer["usage"]["output_tokens"] == len("<think>hm</think>So.") + 1


async def test_a_model_that_cannot_think_answers_without(post: Any) -> None:
    body = HELLO | {"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "high"}}
    llm = scripted("So.")
    llm.text = text_side(reasoning=None)
    answer = await post(llm, body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-lmkit-warnings"] == "dropped: output_config.effort, thinking"


async def test_max_tokens_is_a_ceiling(post: Any) -> None:
    """Clients ask for as much as their model might say."""
    llm = scripted("ok")
    answer = await post(llm, HELLO | {"max_tokens": 1 << 20})
    assert answer.status_code == 200, answer.text
    prompt = len(llm.client.requests[0].token_ids)
    assert llm.client.requests[0].params.max_tokens == llm.facts.max_length - prompt


# ------------------------------------------------------------------------------------------- the official client


def client(url: str, key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)


async def test_messages_whole_and_streamed() -> None:
    async with listening(scripted("Good day.", "Good day.")) as url, client(url) as c:
        whole = await c.messages.create(**HELLO)
        assert (whole.content[0].text, whole.stop_reason, whole.model) == ("Good day.", "end_turn", "scripted")
        assert whole.usage.input_tokens > 0
        async with c.messages.stream(**HELLO) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert text == final.content[0].text == "Good day."
        assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


async def test_a_call_and_its_result() -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    llm = scripted(CALL, CALL, "It is sunny.")
    async with listening(llm) as url, client(url) as c:
        asked = HELLO | {"tools": [WEATHER], "thinking": thinking, "max_tokens": 2000}
        whole = await c.messages.create(**asked)
        async with c.messages.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_message()
        for message in (whole, final):
            thought, said, call = message.content
            assert (thought.type, thought.thinking) == ("thinking", "the user\nasks")
            assert (said.type, said.text) == ("text", "Let me see.")
            assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Zürich"})
            assert message.stop_reason == "tool_use"
        call = whole.content[2]
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
        conversation = [
            *HELLO["messages"], {"role": "assistant", "content": whole.content},  # type: ignore[misc]
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sun"}]},
        ]  # fmt: skip
        after = await c.messages.create(**(asked | {"messages": conversation}))
        assert after.content[0].text == "It is sunny."
        assert "<|tool|>sun" in said_to(llm, 2)


@pytest.mark.parametrize(
    ("script", "options", "reason", "sequence"),
    [
        ("one two", {"stop_sequences": [" tw"]}, "stop_sequence", " tw"),
        ("one two three", {"max_tokens": 3}, "max_tokens", None),
        ("one", {}, "end_turn", None),
    ],
)
async def test_why_it_ended(script: str, options: dict[str, Any], reason: str, sequence: str | None) -> None:
    async with listening(scripted(script, script)) as url, client(url) as c:
        whole = await c.messages.create(**(HELLO | options))
        async with c.messages.stream(**(HELLO | options)) as stream:
            final = await stream.get_final_message()
    for message in (whole, final):
        assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


async def test_tokens_are_counted_as_they_are_used() -> None:
    async with listening(scripted("x")) as url, client(url) as c:
        asked = {k: v for k, v in HELLO.items() if k != "max_tokens"}
        counted = await c.messages.count_tokens(**asked, tools=[WEATHER], system="Be brief.")
        used = await c.messages.create(**HELLO, tools=[WEATHER], system="Be brief.")
    assert counted.input_tokens == used.usage.input_tokens > 0


async def test_models() -> None:
    async with listening(scripted("x")) as url, client(url) as c:
        assert [model.id async for model in c.models.list()] == ["scripted"]
        found = await c.models.retrieve("scripted")
        assert (found.display_name, found.lifecycle, found.max_input_tokens) == ("scripted", "active", 4096)
        assert found.model_validate(found.model_dump()) == found  # all that its class asks for
        with pytest.raises(anthropic.NotFoundError):
            await c.models.retrieve("other")


async def test_errors_are_those_of_the_client() -> None:
    async with listening(scripted("x"), ServerSettings(api_keys=("secret",))) as url:
        async with client(url, "wrong") as c:
            with pytest.raises(anthropic.AuthenticationError) as found:
                await c.messages.create(**HELLO)
            assert found.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        async with client(url, "secret") as c:
            with pytest.raises(anthropic.BadRequestError, match="temperature"):
                await c.messages.create(**HELLO, extra_body={"temperature": 9.0})
            assert (await c.messages.create(**HELLO)).content[0].text == "x"


async def test_streamed_is_whole_on_many_prompts() -> None:
    """A model that says something else to each prompt, and nothing in particular."""
    async with hashed() as llm, listening(llm) as url, client(url) as c:
        for seed in range(20):
            asked = {
                "model": "hash",
                "max_tokens": 5 + seed,
                "messages": [{"role": "user", "content": f"No. {seed}"}],
                "extra_body": {"temperature": 0},
            }
            asked["model"] = (await c.models.list()).data[0].id
            whole = await c.messages.create(**asked)
            async with c.messages.stream(**asked) as stream:
                final = await stream.get_final_message()
            assert [b.text for b in final.content] == [b.text for b in whole.content]
            ends = [(m.stop_reason, m.usage.output_tokens) for m in (final, whole)]
            assert ends[0] == ends[1]


# ------------------------------------------------------------------------------------------------ hostile bodies

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["type", "text", "role", "content", "input", "id", "name", "tool_use_id", "thinking", "x"]), inner, max_size=5),
    max_leaves=12,
)  # fmt: skip
bodies = st.dictionaries(
    st.sampled_from(["messages", "system", "tools", "tool_choice", "max_tokens", "thinking", "output_config"]),
    json_values, max_size=5,
)  # fmt: skip
kinds = st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image", "x"])
blocks = st.lists(st.fixed_dictionaries({"type": kinds}, optional={
    "text": st.text(max_size=5) | st.none(), "id": st.text(max_size=3), "name": st.text(max_size=3),
    "input": st.dictionaries(st.text(max_size=2), json_values, max_size=2), "tool_use_id": st.text(max_size=3),
    "content": json_values, "thinking": st.text(max_size=4)}), max_size=4)  # fmt: skip
turns = st.lists(st.fixed_dictionaries({
    "role": st.sampled_from(["user", "assistant", "system"]), "content": st.text(max_size=9) | blocks,
}), max_size=4)  # fmt: skip


async def test_tools_of_services_are_left_out(post: Any) -> None:
    llm = scripted("Hello.")
    hosted = [{"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"}]
    answer = await post(llm, HELLO | {"tools": [*hosted, WEATHER]})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-lmkit-warnings"] == "dropped: tools.bash_20250124, tools.web_search_20250305"
    prompt = llm.text.decode_all(llm.client.requests[0].token_ids)
    assert "get_weather" in prompt
    assert "web_search" not in prompt


async def test_a_history_from_elsewhere_is_read(post: Any) -> None:
    """Texts of documents are read; what services did is left out; arguments may be anything."""
    llm = scripted("Hello.")
    document = {"type": "document", "title": "Notes", "source": {"type": "text", "data": "the plan",
                                                                 "media_type": "text/plain"}}  # fmt: skip
    messages = [
        {"role": "user", "content": [document, {"type": "text", "text": "Well?"}]},
        {"role": "assistant", "content": [
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": {"type": "error", "error_code": "x"}},
            {"type": "text", "text": "I see."},
            {"type": "tool_use", "id": "a", "name": "get_weather", "input": None},
            {"type": "tool_use", "id": "b", "name": "get_weather", "input": "cut {"},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": "3"} for id in "ab"]},
        {"role": "assistant", "content": []},
        {"role": "user", "content": []},
    ]  # fmt: skip
    answer = await post(llm, HELLO | {"messages": messages})
    assert answer.status_code == 200, answer.text
    prompt = llm.text.decode_all(llm.client.requests[0].token_ids)
    for text in ("Notes", "the plan", "I see.", "cut {"):
        assert text in prompt
    left_out = answer.headers["x-lmkit-warnings"]
    assert "messages.content.server_tool_use" in left_out
    assert "messages.content.web_search_tool_result" in left_out


@settings(max_examples=200, deadline=None)
@given(body=bodies, said=st.none() | turns, route=st.sampled_from([MESSAGES, COUNT]))
def test_any_body_is_read_or_refused(body: dict[str, Any], said: Any, route: str) -> None:
    """By a RequestError with the field; nothing else is raised, whatever clients send."""
    from lmkit.api import RequestError

    given_body = {"max_tokens": 5, **body, **({} if said is None else {"messages": said})}
    llm = scripted("x")
    served = Served(("scripted",), (), llm.text.tokenizer, {}, 4096, 8, 1 << 17, about={"capabilities": {}})
    try:
        Anthropic().parse(Incoming(route, json.dumps(given_body).encode()), served)
    except RequestError as error:
        shown = json.loads(Anthropic().error(error.info()))
        assert shown["type"] == "error"
        assert shown["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"null", b'{"messages": 1e999}', b'"' + b"[" * 9999])
async def test_what_is_no_request(post: Any, body: bytes) -> None:
    answer = await post(scripted("x"), body)
    assert (answer.status_code, answer.json()["type"]) == (400, "error")


def test_an_error_in_the_middle_of_a_stream() -> None:
    data = Anthropic().error_chunk(ErrorInfo("engine-dead", "the engine is not running", status=503))
    assert data.startswith(b"event: error\ndata: {")
    assert json.loads(data.partition(b"data: ")[2])["error"]["type"] == "overloaded_error"
