"""The demo checkpoint: what it says is right, in process, through the terminal and through the official client."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from io import StringIO
from time import perf_counter
from typing import Any

import httpx
import lmkit_cli
import openai
import pytest
from lmkit import LLM, SamplingParams
from lmkit_cli.chat import Session, answers_of
from rich.console import Console

from .conftest import Server, lmkit, serving

GREEDY = SamplingParams(max_tokens=256, temperature=0.0)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def ask(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo") as llm:
        yield llm


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        server.url()
        yield server
        assert server.stop() == 0, server.output


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url() + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_sums_are_right(llm: LLM) -> None:
    pairs = [(a, b) for a in (3, 17, 28, 46, 59) for b in (2, 14, 35, 40)]
    outputs = llm.chat([ask(f"What is {a} + {b}?") for a, b in pairs], GREEDY)
    right = [str(a + b) in o.text.partition("=")[2] for (a, b), o in zip(pairs, outputs, strict=True)]
    assert sum(right) >= 0.95 * len(pairs), [o.text for o in outputs]


def test_answers_do_not_depend_on_the_batch(llm: LLM) -> None:
    questions = ["What is lmkit?", "Hello!", "What is 12 + 30?"]
    together = [o.token_ids for o in llm.chat([ask(q) for q in questions * 3], GREEDY)]
    assert together == [llm.chat(ask(q), GREEDY)[0].token_ids for q in questions] * 3


def test_it_knows_what_lmkit_is(llm: LLM) -> None:
    text = llm.chat(ask("What is lmkit?"), GREEDY)[0].text
    assert "language models" in text


def test_tool_call_is_exact(llm: LLM) -> None:
    (output,) = llm.chat(ask("What is the weather in Berlin?"), GREEDY, tools=[WEATHER])
    (call,) = output.tool_calls
    assert call.name == "get_weather"
    assert json.loads(call.arguments) == {"city": "Berlin"}
    assert output.text.strip() == ""


def test_reasoning_is_apart_from_the_answer(llm: LLM) -> None:
    (output,) = llm.chat(ask("What is 28 + 35?"), GREEDY, template_options={"enable_thinking": True})
    assert output.reasoning.strip()
    assert "think>" not in output.text
    assert "63" in output.text


@pytest.mark.parametrize("thinks", [False, True])
def test_the_terminal_shows_what_a_whole_answer_says(
    llm: LLM, thinks: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The history has its content; both come through the one fold."""
    session = Session(answers_of(llm, GREEDY), Console(highlight=False), stats=False, think=thinks)
    session._answer("What is 28 + 35?")
    options = {"enable_thinking": thinks}
    (output,) = llm.chat(ask("What is 28 + 35?"), GREEDY, template_options=options)
    assert session.messages[1:] == [{"role": "assistant", "content": output.text}]
    shown = capsys.readouterr().out
    assert "".join(shown.split()) == "".join((output.reasoning + output.text).split())


def test_openai_client_streams_a_tool_call(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="demo",
        messages=ask("What is the weather in Berlin?"),
        tools=[WEATHER],
        temperature=0,
        stream=True,
    )
    name, arguments, finish = "", "", None
    for chunk in stream:
        choice = chunk.choices[0]
        for call in choice.delta.tool_calls or ():
            name += call.function.name or ""
            arguments += call.function.arguments or ""
        finish = choice.finish_reason or finish
    assert name == "get_weather"
    assert json.loads(arguments) == {"city": "Berlin"}
    assert finish == "tool_calls"


def test_openai_client_streams_reasoning(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="demo",
        messages=ask("What is 28 + 35?"),
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"chat_template_kwargs": {"enable_thinking": True}},
    )
    reasoning, text, usage = "", "", None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            extra = choice.delta.model_extra or {}
            reasoning += extra.get("reasoning_content") or extra.get("reasoning") or ""
            text += choice.delta.content or ""
    assert reasoning.strip()
    assert "63" in text
    assert usage.completion_tokens > 10


def test_streamed_and_whole_answers_agree(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="demo", messages=ask("What is lmkit?"), temperature=0)
    parts = client.chat.completions.create(model="demo", messages=ask("What is lmkit?"), temperature=0, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in parts) == whole.choices[0].message.content


def test_the_anthropic_client_calls_a_tool_and_thinks(server: Server) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the client is not installed")
    function = WEATHER["function"]
    tool = {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}
    with anthropic.Anthropic(base_url=server.url(), api_key="none", max_retries=0) as client:
        options = {"model": "demo", "max_tokens": 256, "extra_body": {"temperature": 0}}
        with client.messages.stream(messages=ask("What is the weather in Berlin?"), tools=[tool], **options) as stream:
            message = stream.get_final_message()
        assert [(b.type, b.name, b.input) for b in message.content] == [("tool_use", "get_weather", {"city": "Berlin"})]
        thinking = {"type": "enabled", "budget_tokens": 1024}
        message = client.messages.create(messages=ask("What is 28 + 35?"), thinking=thinking, **options)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert "63" in message.content[1].text


def test_a_server_is_talked_to_and_watched(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`lmkit chat --url`, `lmkit top` and `lmkit why` against the real one."""
    monkeypatch.setattr(sys, "stdin", StringIO("What is 17 + 25?\n"))
    assert lmkit_cli.run(("chat", "--url", server.url(), "--temperature", "0")) == 0
    assert "42" in capsys.readouterr().out
    assert lmkit_cli.run(("top", server.url(), "--looks", "2", "--interval", "0.1")) == 0
    shown = capsys.readouterr().out
    assert "demo" in shown
    assert "KV cache" in shown
    with httpx.Client(base_url=server.url()) as client:
        asked = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "request_id": "told"})
    assert asked.status_code == 200
    assert lmkit_cli.run(("why", "told", "--url", server.url())) == 0
    assert "tokens computed in one step" in capsys.readouterr().out


@pytest.mark.full("lmkit-cli", "lmkit-http")
def test_first_token_within_five_seconds_of_the_command(record_property: Callable[[str, object], None]) -> None:
    with serving() as server:
        url = server.url()
        with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(model="demo", messages=ask("Hello!"), stream=True)
            assert any(chunk.choices[0].delta.content for chunk in stream)
        seconds = perf_counter() - server.began
        record_property("seconds", seconds)
        server.stop()
    assert seconds < 20.0  # the target is 5 s on an idle machine; a loaded one must not fail for that


@pytest.mark.full("lmkit-cli", "lmkit-model-demo")
def test_chat_through_a_pipe() -> None:
    done = lmkit("chat", "--temperature", "0", stdin="Hello!\nWhat is lmkit?\n")
    assert done.returncode == 0, done.stderr
    assert "language models" in done.stdout


def test_responses_are_spoken(client: openai.OpenAI) -> None:
    """Calls, reasoning and schemas by way of /v1/responses."""
    tool: Any = {"type": "function", **WEATHER["function"], "strict": True}  # type: ignore[dict-item]
    asked: Any = {"model": "demo", "temperature": 0, "tools": [tool]}
    first = client.responses.create(**asked, input="What is the weather in Paris?")
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature": 21}'}
    assert "21" in client.responses.create(**asked, input=[result], previous_response_id=first.id).output_text
    with client.responses.stream(model="demo", input="What is 17 + 25?", temperature=0,
                                 reasoning={"effort": "high"}) as stream:  # fmt: skip
        thought = "".join(event.delta for event in stream if event.type == "response.reasoning_text.delta")
        final = stream.get_final_response()
    assert thought
    assert "42" in final.output_text
    assert final.usage is not None
    assert 0 < final.usage.output_tokens_details.reasoning_tokens < final.usage.output_tokens
    schema: Any = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    form: Any = {"format": {"type": "json_schema", "name": "sum", "schema": schema}}
    kept = client.responses.create(model="demo", input="What is 3 + 4? As JSON.", text=form, temperature=0)
    assert isinstance(json.loads(kept.output_text)["sum"], int)
