"""What is accepted, what is refused, and how: every field bounded, every refusal named (S6, P8, P13)."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lmkit.api import RequestError
from lmkit_dialect_openai import extensions
from lmkit_dialect_openai.chat import ask_of
from lmkit_dialect_openai.fields import DROPPABLE
from lmkit_dialect_openai.schema import ChatRequest, CompletionRequest
from lmkit_http.dialect import Served
from lmkit_http.info_schema import DetokenizeRequest, TokenizeRequest
from lmkit_http.strict import parse
from lmkit_testing.serving import byte_tokenizer, scripted
from pydantic import BaseModel

SERVED = Served(("scripted",), (), scripted("x").text.tokenizer, {}, 4096, 8, 1 << 17)
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
SERVED = Served(("m",), (), byte_tokenizer(), {}, 100, 10, 1000)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def ask(kind: Any, body: dict[str, Any]) -> None:
    request = parse(kind, json.dumps(body).encode(), lenient=False)
    request.check()
    ask_of(request, SERVED)


def refusal(kind: type[BaseModel], body: dict[str, Any]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        ask(kind, body)
    return caught.value


@pytest.mark.parametrize(
    ("extra", "field", "text"),
    [
        ({"strem": True}, "strem", "'stream'"),
        ({"top_logits": 1}, "top_logits", "unknown"),
        ({"temperature": -0.1}, "temperature", "got -0.1"),
        ({"temperature": True}, "temperature", "number"),
        ({"n": True}, "n", "integer"),
        ({"n": 1.5}, "n", "integer"),
        ({"n": 0}, "n", "1"),
        ({"n": 10**9}, "n", "64"),
        ({"max_tokens": -2}, "max_tokens", "equal to 1"),
        ({"max_tokens": 0}, "max_tokens", "equal to 1"),
        ({"seed": 2**64}, "seed", ""),
        ({"top_p": -0.1}, "top_p", ""),
        ({"stop": ["a"] * 17}, "stop", "16"),
        ({"stop": ["a" * 1025]}, "stop.0", "1024"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"1": 1000}}, "logit_bias.1", "100"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "20"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
        ({"response_format": {"type": "json"}}, "response_format.type", "'text'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema", "required"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.json_schema", "take"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "got json, regex"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
         "structured_outputs", "exclude"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
        ({"structured_outputs": {"regex": "a" * (1 << 20)}}, "grammar.source", "524288"),
        ({"structured_outputs": {"xgrammar": "a"}}, "structured_outputs.xgrammar", "unknown"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "exclude"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens", "exclude"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice", "'g'"),
        ({"tool_choice": "required", "tools": [TOOL], "structured_outputs": {"regex": "a"}},
         "structured_outputs", "exclude"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "letters"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(10_000)]}, "tools", "512"),
        ({"thinking_token_budget": -1}, "thinking_token_budget", "0"),
        ({"tools": [TOOL, TOOL]}, "tools", "same name"),
        ({"tools": [{"type": "web"}], "tool_choice": "required"}, "tools.0.type", "send functions"),
        ({"messages": []}, "messages", "at least 1 entry"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "'user'"),
        ({"functions": [{}]}, "functions", "send tools"),
        ({"temperature": "one"}, "temperature", "number"),
        ({"n": "1.5"}, "n", "integer"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1"),
        ({"guided_json": {"type": "object"}}, "guided_json", "structured_outputs"),
        ({"best_of": 2}, "best_of", "send n"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "required"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "messages.0.content.0.type", "takes no images"),
        ({"chat_template": "x"}, "chat_template", "--chat-template"),
        ({"continue_final_message": True}, "continue_final_message", "assistant"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(extra: dict[str, Any], field: str | None, text: str) -> None:
    if extra.get("logit_bias") == {"a": 1}:
        with pytest.raises(RequestError) as caught:
            parse(ChatRequest, json.dumps(HELLO | extra).encode()).params(SERVED, None, None)
        error = caught.value
    else:
        error = refusal(ChatRequest, HELLO | extra)
    if field is not None:
        assert error.field == field
    assert text in f"{error.message} {error.fix}"
    assert error.status == 400


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"messages": NaN}', b"\xff\xfe", b"[" * 100_000])
def test_bodies_that_are_no_request(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse(ChatRequest, body)
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "frequency_penalty", "repetition_penalty"])
def test_no_infinities(field: str, value: str) -> None:
    with pytest.raises(RequestError):
        parse(CompletionRequest, f'{{"prompt": "x", "{field}": {value}}}'.encode())


def unbounded(schema: Any, path: str, root: Any, seen: set[str]) -> list[str]:
    """Numbers, strings and lists without limits in a JSON schema."""
    if not isinstance(schema, dict):
        return []
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in seen or name == "JsonValue":
            return []
        return unbounded(root["$defs"][name], path, root, seen | {name})
    found = []
    if "enum" not in schema and "const" not in schema:
        need = {
            "string": {"maxLength"}, "array": {"maxItems"}, "integer": {"maximum", "minimum"}, "number": {"maximum"},
        }.get(schema.get("type", ""), set())  # fmt: skip
        found += [f"{path} has no {n}" for n in need if n not in schema]
        if schema.get("type") == "object" and "properties" not in schema and "maxProperties" not in schema:
            found.append(f"{path} has no maxProperties")
    for key, value in schema.get("properties", {}).items():
        found += unbounded(value, f"{path}.{key}", root, seen)
    for key in ("anyOf", "oneOf", "allOf"):
        for value in schema.get(key, ()):
            found += unbounded(value, path, root, seen)
    found += unbounded(schema.get("items"), f"{path}[]", root, seen)
    found += unbounded(schema.get("additionalProperties"), f"{path}{{}}", root, seen)
    return found


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest])
def test_everything_is_bounded(kind: type[BaseModel]) -> None:
    schema = kind.model_json_schema()
    assert unbounded(schema, kind.__name__, schema, set()) == []


def test_extensions_are_listed_in_one_place() -> None:
    """Fields that the OpenAI API does not have are in lmkit_dialect_openai.extensions, and nothing else is."""
    openai_chat = {
        "messages", "model", "temperature", "top_p", "frequency_penalty", "presence_penalty", "max_tokens", "n", "seed",
        "stop", "stream", "stream_options", "logit_bias", "max_completion_tokens", "logprobs", "top_logprobs",
        "tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort",
    }  # fmt: skip
    assert set(ChatRequest.model_fields) == openai_chat | extensions.CHAT_REQUEST
    openai_completion = {
        "prompt", "model", "temperature", "top_p", "frequency_penalty", "presence_penalty", "max_tokens", "n", "seed",
        "stop", "stream", "stream_options", "logit_bias", "echo", "logprobs", "best_of",
    }  # fmt: skip
    assert set(CompletionRequest.model_fields) == openai_completion | extensions.COMPLETION_REQUEST


async def test_what_is_ignored_changes_nothing_and_is_named(connect: Any) -> None:
    values = {name: {"a": "b" * 600} for name in DROPPABLE}
    requests = []
    for extra in ({}, values):
        llm = scripted("ok")
        response = await connect(llm).post("/v1/chat/completions", json=HELLO | extra)
        assert response.status_code == 200
        named = response.headers.get("x-lmkit-warnings", "dropped: ").removeprefix("dropped: ")
        assert set(filter(None, named.split(", "))) == set(extra)
        (request,) = llm.client.requests  # type: ignore[attr-defined]
        requests.append(msgspec.structs.replace(request, id="", arrival=0.0))
    assert requests[0] == requests[1]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.dictionaries(st.sampled_from([*ChatRequest.model_fields, "x"]), JSON, max_size=4), st.booleans())
async def test_any_json_gets_an_answer(connect: Any, extra: dict[str, Any], valid: bool) -> None:
    """Never a 500, never a path, an address or a stack trace (S10)."""
    client = connect(scripted("ok"))
    body = (HELLO if valid else {}) | extra
    response = await client.post("/v1/chat/completions", content=json.dumps(body))
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code == 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert not re.search(r"0x[0-9a-f]{6,}|Traceback|site-packages|\.py", error["message"])


async def test_too_long_prompts_say_both_numbers(connect: Any) -> None:
    client = connect(scripted("ok", max_length=20))
    response = await client.post("/v1/completions", json={"prompt": "x" * 30})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "30" in error["message"]
    assert "20" in error["message"]
    response = await client.post("/v1/completions", json={"prompt": "x" * 10, "max_tokens": 10})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("prompt", "field"),
    [("", "prompt"), ([], "prompt"), ([300], "prompt"), ([-1], "prompt"), ([[]], "prompt"), ([True], "prompt")],
)
async def test_bad_prompts(connect: Any, prompt: Any, field: str) -> None:
    response = await connect(scripted("ok")).post("/v1/completions", json={"prompt": prompt})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(field)


async def test_unknown_model(connect: Any) -> None:
    response = await connect(scripted("ok")).post("/v1/chat/completions", json=HELLO | {"model": "other"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "scripted" in response.json()["error"]["message"]


async def test_variables_that_the_template_does_not_read_are_dropped(connect: Any) -> None:
    response = await connect(scripted("ok")).post(
        "/v1/chat/completions", json=HELLO | {"chat_template_kwargs": {"tokenize": True}}
    )
    assert response.status_code == 200
    assert response.headers["x-lmkit-warnings"] == "dropped: chat_template_kwargs.tokenize"


async def test_params_reach_the_engine(connect: Any) -> None:
    """What is accepted is honoured."""
    llm = scripted("ok")
    body = HELLO | {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "frequency_penalty": 0.1, "presence_penalty": 0.2,
        "repetition_penalty": 1.1, "seed": 7, "n": 2, "stop": "x", "stop_token_ids": [3], "ignore_eos": True,
        "min_tokens": 1, "max_completion_tokens": 9, "logit_bias": {"5": -100}, "logprobs": True, "top_logprobs": 2,
        "priority": 3, "cache_salt": "s",
    }  # fmt: skip
    response = await connect(llm).post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    first, second = llm.client.requests  # type: ignore[attr-defined]
    p = first.params
    assert (p.temperature, p.top_p, p.top_k, p.min_p) == (0.5, 0.9, 5, 0.1)
    assert (p.frequency_penalty, p.presence_penalty, p.repetition_penalty) == (0.1, 0.2, 1.1)
    assert (p.seed, second.params.seed) == (7, 8)
    assert (p.stop, p.stop_token_ids, p.ignore_eos, p.min_tokens, p.max_tokens) == (("x",), (3,), True, 1, 9)
    assert (p.logit_bias, p.logprobs) == (((5, -100.0),), 2)
    assert (first.priority, first.cache_salt) == (3, "s")
