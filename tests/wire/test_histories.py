"""Whatever a client may hold in its history: every template renders it, or the refusal names the message and the field.

Every history is written down once, in the form of chat completions, and sent in the form of each dialect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lmkit.api import ChatRenderer, RequestError, TemplateFailed
from lmkit.prompts import short_id
from lmkit_dialect_anthropic.dialect import MESSAGES, Anthropic
from lmkit_dialect_ollama.dialect import Ollama
from lmkit_dialect_openai.dialect import OpenAI
from lmkit_dialect_responses.dialect import CREATE, Responses
from lmkit_http.dialect import ChatAsk, Dialect, Exchange, Incoming, Served
from lmkit_testing.serving import byte_tokenizer
from lmkit_tokenizer_json.render import Renderer

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "chat_templates"
FILES = sorted(DATA.glob("*.jinja"))
pytestmark = pytest.mark.skipif(not FILES, reason="needs the chat templates of ../shared/data")
Message = dict[str, Any]
Body = dict[str, Any]

ID = "abcdefghi"
USER: Message = {"role": "user", "content": "Hello"}
SAID: Message = {"role": "assistant", "content": "Good day."}
RESULT: Message = {"role": "tool", "tool_call_id": ID, "content": "3"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "The weather", "parameters": PARAMETERS}
CUT = '{"city": "/tmp/a'


def call(arguments: Any = "{}", id: str | None = ID, **more: Any) -> Message:
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "content": None, **more,
            "tool_calls": [{"id": id, "type": "function", "function": function}]}  # fmt: skip


def called(arguments: Any) -> list[Message]:
    return [USER, call(arguments), RESULT, SAID, USER]


ODD_ARGUMENTS = [
    CUT,
    '"Beijing"',
    "[1]",
    "null",
    "",
    "  ",
    "12",
    "true",
    '[{"a": 1}]',
    "<|im_end|>",
    "{'a': 1}",
    '{"a": null}',
]
ANSWERS: dict[str, Message] = {
    "no calls": {**SAID, "tool_calls": []},
    "no calls and no content": {"role": "assistant", "content": None, "tool_calls": []},
    "nulls": {"role": "assistant", "content": None, "tool_calls": None, "refusal": None, "reasoning_content": None},
    "nothing": {"role": "assistant"},
    "empty": {"role": "assistant", "content": ""},
    "no parts": {"role": "assistant", "content": []},
    "an empty part": {"role": "assistant", "content": [{"type": "text", "text": ""}]},
    "several parts": {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    "reasoning": {**SAID, "reasoning_content": "hm"},
    "reasoning alone": {"role": "assistant", "content": None, "reasoning_content": "hm"},
    "empty reasoning": {**SAID, "reasoning_content": "", "reasoning": ""},
    "a refusal": {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
}
HISTORIES: dict[str, list[Message]] = {
    **{f"arguments {text}": called(text) for text in ODD_ARGUMENTS},
    **{f"answer: {name}": [USER, answer, USER] for name, answer in ANSWERS.items()},
    "an image": [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}
    ],
    "an image in an answer": [
        USER,
        {"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        USER,
    ],
    "a file": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "x"}}]}],
    "an unknown part": [{"role": "user", "content": [{"type": "hologram"}]}],
    "empty user": [{"role": "user", "content": ""}],
    "no parts of the user": [{"role": "user", "content": []}],
    "result without call": [USER, RESULT, USER],
    "result of another call": [USER, call(), {**RESULT, "tool_call_id": "abcdefghj"}, USER],
    "empty result": [USER, call(), {**RESULT, "content": ""}, SAID, USER],
    "result in parts": [USER, call(), {**RESULT, "content": [{"type": "text", "text": "3"}]}, SAID, USER],
    "result without parts": [USER, call(), {**RESULT, "content": []}, SAID, USER],
    "call without result": [USER, call(), USER],
    "two calls with one id": [USER, {**call(), "tool_calls": call()["tool_calls"] * 2}, RESULT, RESULT, USER],
    "long ids": [USER, call(id="toolu_" + "0" * 24), {**RESULT, "tool_call_id": "toolu_" + "0" * 24}, SAID, USER],
    "text beside the call": [USER, call(content="Let me see."), RESULT, SAID, USER],
    "reasoning beside the call": [USER, call(reasoning_content="hm"), RESULT, SAID, USER],
    "system in the middle": [USER, SAID, {"role": "system", "content": "Be brief."}, USER],
    "developer": [{"role": "developer", "content": "Be brief."}, USER],
    "an unknown role": [USER, {"role": "critic", "content": "x"}, USER],
    "two answers": [USER, SAID, SAID, USER],
    "an answer first": [SAID, USER],
}
IN_CHAT: dict[str, list[Message]] = {
    "arguments as an object": called({"city": "Paris"}),
    "arguments as a list": called([1]),
    "null arguments": called(None),
    "no ids": [USER, call(id=None), {"role": "tool", "content": "3"}, SAID, USER],
    "ids of one digit": [USER, call(id="1"), {"role": "tool", "tool_call_id": "1", "content": "3"}, SAID, USER],
    "empty ids": [USER, call(id=""), {"role": "tool", "tool_call_id": "", "content": "3"}, SAID, USER],
    "a result that is null": [USER, call(), {**RESULT, "content": None}, SAID, USER],
    "functions": [USER, {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": CUT}},
                  {"role": "function", "name": "weather", "content": "3"}, SAID, USER],
    "a custom tool": [
        USER,
        {"role": "assistant", "tool_calls": [{"id": ID, "type": "custom", "custom": {"name": "f", "input": "x"}}]},
        RESULT, SAID, USER,
    ],
    "a call without a type": [
        USER, {"role": "assistant", "tool_calls": [{**call()["tool_calls"][0], "type": None}]}, RESULT, SAID, USER,
    ],
    "a call of an unknown type": [
        USER, {"role": "assistant", "tool_calls": [{"id": ID, "type": "dance", "function": None}]}, RESULT, USER,
    ],
    "a call of nothing": [USER, {"role": "assistant", "tool_calls": [{"id": ID}]}, RESULT, USER],
    "no content of the user": [{"role": "user"}],
    "null for the user": [{"role": "user", "content": None}],
}  # fmt: skip
# templates that a history may not suit: what its refusal says, and of which message
STRICT = {
    "google-gemma-2-2b-it": "must alternate|System role not supported",
    "mistralai-Mistral-Nemo-Instruct-2407": "must alternate|Only user and assistant roles",
    "tool_chat_template_mistral3": "Only user and assistant roles",
    "meta-llama-Llama-3.1-8B-Instruct": "single tool-calls",
    "meta-llama-Llama-3.2-3B-Instruct": "single tool-calls",
    "tool_chat_template_llama3.1_json": "single tool-calls",
    "MiniMax-M2": "no previous assistant message with a tool call",
    "openai-gpt-oss-120b": "no previous assistant message with a tool call",
}


def of_chat(messages: list[Message]) -> Body:
    return {"messages": messages, "tools": [{"type": "function", "function": FUNCTION}]}


def text_parts(content: Any, kind: str) -> Any:
    if not isinstance(content, list):
        return content
    return [{**part, "type": kind} if part["type"] == "text" else part for part in content]


def of_responses(messages: list[Message]) -> Body:
    items: list[Body] = []
    for message in messages:
        role, content = message["role"], message.get("content")
        if message.get("reasoning_content"):
            text = {"type": "reasoning_text", "text": message["reasoning_content"]}
            items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": [{**text, "type": "text"}]})
        if role == "tool":
            items.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": content})
            continue
        if content is not None:
            kind = "output_text" if role == "assistant" else "input_text"
            items.append({"type": "message", "role": role, "content": text_parts(content, kind)})
        for one in message.get("tool_calls") or ():
            items.append({"type": "function_call", "call_id": one["id"], **one["function"]})
    return {"input": items, "tools": [{"type": "function", **FUNCTION}]}


def of_messages(messages: list[Message]) -> Body:
    turns: list[Body] = []
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}
            turns.append({"role": "user", "content": [block]})
            continue
        blocks: list[Body] = []
        if message.get("reasoning_content"):
            blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
        parts = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
        blocks += [{"type": "text", "text": part["refusal"]} if "refusal" in part else part for part in parts]
        for one in message.get("tool_calls") or ():
            try:
                arguments = json.loads(one["function"]["arguments"])
            except ValueError:
                arguments = one["function"]["arguments"]
            blocks.append({"type": "tool_use", "id": one["id"], "name": "weather", "input": arguments})
        turns.append({"role": "system" if role == "developer" else role, "content": blocks})
    tool = {"name": "weather", "description": "The weather", "input_schema": PARAMETERS}
    return {"max_tokens": 9, "messages": turns, "tools": [tool]}


def of_ollama(messages: list[Message]) -> Body:
    said = []
    for message in messages:
        content = message.get("content")
        plain = {k: v for k, v in message.items() if k != "content"}
        if isinstance(content, list):
            plain |= {"content": "".join(part.get("text", "") for part in content)}
            if any("image" in part["type"] for part in content):
                plain["images"] = ["AA"]
        elif content is not None:
            plain["content"] = content
        said.append(plain)
    return {"model": "m", "messages": said, "tools": [{"type": "function", "function": FUNCTION}]}


DIALECTS: dict[str, tuple[Callable[[], Dialect], str, Callable[[list[Message]], Body]]] = {
    "chat": (OpenAI, "POST /v1/chat/completions", of_chat),
    "responses": (Responses, CREATE, of_responses),
    "messages": (Anthropic, MESSAGES, of_messages),
    "ollama": (Ollama, "POST /api/chat", of_ollama),
}


@cache
def renderer_of(file: Path) -> Renderer:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return Renderer(file.read_text(), tokens, control_tokens=["<|im_end|>", "<|im_start|>"])


def rendered(dialect: str, renderer: ChatRenderer, messages: list[Message]) -> str:
    """The prompt of a history that is sent to a dialect. Raises RequestError."""
    make, route, body_of = DIALECTS[dialect]
    about = {"capabilities": {"tools": True, "reasoning": True, "template_options": [], "tasks": []}}
    served = Served(("m",), (), byte_tokenizer(), {}, 4096, 8, 1 << 17, about=about, words=renderer.words)
    exchange = make().parse(Incoming(route, json.dumps(body_of(messages)).encode()), served)
    assert isinstance(exchange, Exchange)
    ask = exchange.ask
    assert isinstance(ask, ChatAsk)
    try:
        return renderer.render(ask.messages, ask.tools)
    except TemplateFailed as error:
        raise error.renamed(ask.places) from None


PLACE = re.compile(r"(messages|input)\.\d+")


def check_refusal(error: RequestError, history: str, template: str) -> None:
    """It names message and field, in words that a user of the API knows."""
    said = f"{error.field}: {error.message}"
    assert PLACE.search(error.field or ""), (history, said)
    assert not re.search(r"lmkit|ClientText|Noted|object has no|\ufdd0", error.message), (history, said)
    if isinstance(error, TemplateFailed):
        assert template in STRICT, (history, said)
        assert re.search(STRICT[template], said), (history, said)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_template_takes_every_history(file: Path, dialect: str) -> None:
    renderer = renderer_of(file)
    histories = HISTORIES | (IN_CHAT if dialect == "chat" else {})
    for name, messages in histories.items():
        try:
            text = rendered(dialect, renderer, messages)
        except RequestError as error:
            check_refusal(error, name, file.stem)
        else:
            assert "ClientText" not in text, name
            assert "Hello" in text or len(messages) == 1, name


SERVED_EVERYWHERE = [name for name in HISTORIES if name.startswith(("arguments", "answer:")) and "null" not in name]


@pytest.mark.parametrize("name", SERVED_EVERYWHERE)
@pytest.mark.parametrize("dialect", ["chat", "responses", "messages", "ollama"])
def test_odd_arguments_and_answers_are_never_refused(dialect: str, name: str) -> None:
    """By templates that take conversations with tools at all."""
    for file in FILES:
        if file.stem not in ("google-gemma-2-2b-it", "mistralai-Mistral-Nemo-Instruct-2407"):
            rendered(dialect, renderer_of(file), HISTORIES[name])


@pytest.mark.parametrize("stem", ["Qwen3-Coder", "GLM-4.6", "MiniMax-M2", "ByteDance-Seed-OSS"])
@pytest.mark.parametrize("arguments", [CUT, '"Beijing"', "[1]", "12", "<|im_end|>"])
def test_a_template_that_walks_over_arguments_gets_them_as_one(stem: str, arguments: str) -> None:
    """What the client wrote stays the client's: a control token in it is broken."""
    text = rendered("chat", renderer_of(DATA / f"{stem}.jinja"), called(arguments))
    assert "arguments" in text.rpartition("weather")[0] + text.rpartition("weather")[2]
    shown = arguments if arguments != "<|im_end|>" else "<\ufdd0|im_end|>"
    assert shown in text


@pytest.mark.parametrize("arguments", ["null", "", "  "])
@pytest.mark.parametrize("stem", ["Qwen3-Coder", "Qwen-Qwen3-0.6B", "meta-llama-Llama-3.1-8B-Instruct"])
def test_arguments_that_say_nothing_are_none(stem: str, arguments: str) -> None:
    renderer = renderer_of(DATA / f"{stem}.jinja")
    assert rendered("chat", renderer, called(arguments)) == rendered("chat", renderer, called("{}"))


def test_a_template_that_shows_text_gets_the_text() -> None:
    text = rendered("chat", renderer_of(DATA / "Qwen-Qwen3-0.6B.jinja"), called(CUT))
    assert f'"arguments": {CUT}' in text


@pytest.mark.parametrize(
    "stem", ["meta-llama-Llama-3.1-8B-Instruct", "openai-gpt-oss-120b", "tool_chat_template_mistral3"]
)
def test_an_empty_list_of_calls_is_none(stem: str) -> None:
    renderer = renderer_of(DATA / f"{stem}.jinja")
    want = rendered("chat", renderer, [USER, SAID, USER])
    assert rendered("chat", renderer, [USER, {**SAID, "tool_calls": [], "refusal": None}, USER]) == want


def test_ids_that_are_missing_are_given_and_long_ones_are_short_where_they_must_be() -> None:
    strict, lenient = (renderer_of(DATA / f"{stem}.jinja") for stem in
                       ("mistralai-Mistral-Nemo-Instruct-2407", "moonshotai-Kimi-K2"))  # fmt: skip
    long = "call_0123456789abcdef"
    messages = [USER, call(id=long), {**RESULT, "tool_call_id": long}, SAID, USER]
    assert rendered("chat", strict, messages).count(short_id(long)) == 2
    assert long in rendered("chat", lenient, messages)
    without = [USER, call(id=None), {"role": "tool", "content": "3"}, SAID, USER]
    assert rendered("chat", strict, without).count("call00000") == 2


def test_results_without_an_id_belong_to_the_calls_in_their_order() -> None:
    renderer = renderer_of(DATA / "moonshotai-Kimi-K2.jinja")
    function = {"name": "weather", "arguments": "{}"}
    calls = [{"type": "function", "function": {**function, "name": name}} for name in ("a", "b", "a")]
    results = [{"role": "tool", "content": text} for text in ("1", "2", "3")]
    results[0]["name"] = "b"
    text = rendered("chat", renderer, [USER, {"role": "assistant", "tool_calls": calls}, *results, USER])
    order = [text.rindex(word) for word in ("call00001", "call00000", "call00002")]
    assert order == sorted(order)


def test_a_refusal_names_what_the_template_read() -> None:
    renderer = renderer_of(DATA / "meta-llama-Llama-3.1-8B-Instruct.jinja")
    two = {**call(), "tool_calls": [*call()["tool_calls"], *call(id="abcdefghj")["tool_calls"]]}
    messages = [USER, SAID, USER, two, RESULT, {**RESULT, "tool_call_id": "abcdefghj"}, USER]
    fields = {}
    for dialect in DIALECTS:
        with pytest.raises(TemplateFailed, match="single tool-calls") as failed:
            rendered(dialect, renderer, messages)
        fields[dialect] = failed.value.field
    assert fields == {"chat": "messages.3.tool_calls", "responses": "input.3", "messages": "messages.3.content",
                      "ollama": "messages.3.tool_calls"}  # fmt: skip
