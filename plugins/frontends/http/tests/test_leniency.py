"""What clients echo, decorate and leave empty is accepted; what is dropped is named in a header."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from lmkit_dialect_openai.fields import CHAT_REFUSED, DROPPABLE
from lmkit_http.settings import ServerSettings
from lmkit_testing.serving import ServedLLM, scripted
from lmkit_tokenizer_json.render import Renderer

USER = {"role": "user", "content": "Hello"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASKED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "ok"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CACHED = {"cache_control": {"type": "ephemeral"}}


def assistant(**extra: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": "Hi", **extra}, USER]


def parts(*found: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": list(found)}, USER]


def text(kind: str = "text", **extra: Any) -> dict[str, Any]:
    return {"type": kind, "text": "Hello", **extra}


# messages -> what is named as dropped
SHAPES: dict[str, tuple[list[dict[str, Any]], set[str]]] = {
    "assistant content null": ([USER, {"role": "assistant", "content": None}, USER], set()),
    "assistant content []": (assistant(content=[]), set()),
    "assistant content empty": (assistant(content=""), set()),
    "assistant without content": ([USER, ASKED, RESULT], set()),
    "content null in a tool's answer": ([USER, ASKED, RESULT | {"content": None}], set()),
    "tool content as parts": ([USER, ASKED, RESULT | {"content": [text()]}], set()),
    "tool name": ([USER, ASKED, RESULT | {"name": "f"}], set()),
    "tool_calls null": (assistant(tool_calls=None), set()),
    "tool_calls []": (assistant(tool_calls=[]), set()),
    "refusal null": (assistant(refusal=None), set()),
    "annotations": (assistant(annotations=[]), set()),
    "audio null": (assistant(audio=None), set()),
    "function_call null": (assistant(function_call=None), set()),
    "message id": (assistant(id="msg_1"), {"messages.id"}),
    "provider_specific_fields": (assistant(provider_specific_fields={"a": 1}), {"messages.provider_specific_fields"}),
    "provider_specific_fields null": (assistant(provider_specific_fields=None), set()),
    "thinking_blocks": (assistant(thinking_blocks=[{"type": "thinking"}]), {"messages.thinking_blocks"}),
    "reasoning_details": (assistant(reasoning_details=[{"text": "a"}]), {"messages.reasoning_details"}),
    "reasoning_content": (assistant(reasoning_content="hm"), set()),
    "reasoning": (assistant(reasoning="hm"), set()),
    "cache_control of a message": ([USER | CACHED], {"messages.cache_control"}),
    "cache_control of a part": (parts(text(**CACHED)), {"messages.content.cache_control"}),
    "part annotations": (parts(text(annotations=[]), role="assistant"), set()),
    "part annotations filled": (parts(text(annotations=[1]), role="assistant"), {"messages.content.annotations"}),
    "part input_text": (parts(text("input_text")), set()),
    "part output_text": (parts(text("output_text"), role="assistant"), set()),
    "part refusal": (parts({"type": "refusal", "refusal": "no"}, role="assistant"), set()),
    "part thinking": (parts({"type": "thinking", "thinking": "hm"}, text(), role="assistant"), set()),
    "parts as strings": (parts("Hel", "lo"), set()),
    "call index": ([USER, ASKED | {"tool_calls": [CALL | {"index": 0}]}, RESULT], set()),
    "call without id": ([USER, ASKED | {"tool_calls": [{"function": CALL["function"]}]}, RESULT], set()),
    "call extra": ([USER, ASKED | {"tool_calls": [CALL | {"extra_content": {"a": 1}}]}, RESULT],
                   {"messages.tool_calls.extra_content"}),
    "function extra": ([USER, ASKED | {"tool_calls": [CALL | {"function": CALL["function"] | {"x": 1}}]}, RESULT],
                       {"messages.tool_calls.function.x"}),
    "role developer": ([{"role": "developer", "content": "x"}, USER], set()),
    "role function": ([USER, {"role": "function", "name": "f", "content": "ok"}], set()),
    "name": ([USER | {"name": "Bob"}], set()),
    "prefix": ([USER, {"role": "assistant", "content": "Hel", "prefix": True}], {"messages.prefix"}),
    "extra of any name": ([USER | {"x" * 90: 1}], {"?"}),
}  # fmt: skip


async def ask(connect: Any, llm: ServedLLM, body: dict[str, Any], **settings: Any) -> tuple[int, set[str], Any]:
    """Status, what the header names, and the body."""
    response = await connect(llm, ServerSettings(**settings)).post("/v1/chat/completions", json=body)
    header = response.headers.get("x-lmkit-warnings", "").removeprefix("dropped: ")
    return response.status_code, set(filter(None, header.split(", "))), response.json()


def prompt(llm: ServedLLM) -> str:
    return llm.text.tokenizer.decode(llm.client.requests[-1].token_ids)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("messages", "dropped"), SHAPES.values(), ids=SHAPES.keys())
async def test_messages_as_clients_send_them(connect: Any, messages: Any, dropped: set[str]) -> None:
    llm = scripted("ok")
    status, named, body = await ask(connect, llm, {"messages": messages, "tools": [TOOL]})
    assert status == 200, body
    assert named == dropped
    assert "Hel" in prompt(llm)


async def test_a_message_of_litellm_can_be_sent_back(connect: Any) -> None:
    """What it makes of an answer: the prompt is the same as with the plain message."""
    plain = [USER, {"role": "assistant", "content": "Hi"}, USER]
    decorated = assistant(provider_specific_fields={"refusal": None}, annotations=[], images=[], thinking_blocks=None)
    prompts = []
    for messages in (plain, decorated):
        llm = scripted("ok")
        assert (await ask(connect, llm, {"messages": messages}))[0] == 200
        prompts.append(prompt(llm))
    assert prompts[0] == prompts[1]


EMPTY = [{name: None} for name in (*CHAT_REFUSED, *DROPPABLE)] + [
    {name: value} for name, refusal in CHAT_REFUSED.items() for value in refusal.unless
] + [
    {"use_beam_search": False}, {"length_penalty": 1.0}, {"bad_words": []}, {"echo": False}, {"best_of": 1},
    {"suffix": ""}, {"spaces_between_special_tokens": True}, {"mm_payload": "tensors"}, {"modalities": ["text"]},
    {"stream_interval": 1}, {"verbosity": "medium"}, {"store": False}, {"anything": None}, {"anything": {}},
    {"stop": ""}, {"stop": [""]}, {"stop": None}, {"model": ""}, {"tools": []}, {"tools": None},
    {"tool_choice": "auto"},
    {"tool_choice": None}, {"stream_options": None}, {"response_format": None}, {"max_tokens": "10"},
    {"max_tokens": 10.0}, {"temperature": "0.5"}, {"seed": "7"}, {"functions": []}, {"function_call": "auto"},
    {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
]  # fmt: skip


@pytest.mark.parametrize("extra", EMPTY, ids=str)
async def test_what_says_nothing_is_accepted(connect: Any, extra: dict[str, Any]) -> None:
    status, named, body = await ask(connect, scripted("ok"), {"messages": [USER], **extra})
    assert (status, named) == (200, set()), body


async def test_the_longer_name_of_a_limit_counts(connect: Any) -> None:
    llm = scripted("abcdefgh")
    status, named, body = await ask(
        connect, llm, {"messages": [USER], "max_tokens": 2, "max_completion_tokens": 4, "stream_options": {}}
    )
    assert (status, named) == (200, {"max_tokens", "stream_options"}), body
    assert body["usage"]["completion_tokens"] == 4


async def test_unknown_fields_are_dropped_unless_the_server_is_told(connect: Any) -> None:
    body = {"messages": [USER], "beam_width": 4}
    assert (await ask(connect, scripted("ok"), body))[:2] == (200, {"beam_width"})
    status, _, error = await ask(connect, scripted("ok"), body, unknown_fields="refuse")
    assert status == 400
    assert error["error"]["param"] == "beam_width"
    assert "did you mean" not in error["error"]["message"].lower()


NESTED = {
    "stream_options.pace": {"stream": True, "stream_options": {"include_usage": True, "pace": 1}},
    "response_format.json_schema.examples": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}, "examples": [1]}}
    },
    "structured_outputs.fast": {"structured_outputs": {"regex": "ok", "fast": True}},
    "tool_choice.function.id": {
        "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f", "id": "x"}}
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "body"), NESTED.items(), ids=NESTED.keys())
async def test_unknown_fields_of_parts_are_dropped_or_refused_alike(
    connect: Any, name: str, body: dict[str, Any]
) -> None:
    body = {"messages": [USER], **body}
    llm = scripted('ok<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    answer = await connect(llm).post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.headers.get("x-lmkit-warnings")) == (200, f"dropped: {name}"), answer.text
    strict = ServerSettings(unknown_fields="refuse")
    answer = await connect(scripted("ok"), strict).post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("unknown_fields", ["warn", "refuse"])
async def test_what_changes_the_meaning_is_refused_in_both_modes(connect: Any, unknown_fields: str) -> None:
    for name in CHAT_REFUSED:
        status, _, error = await ask(
            connect, scripted("ok"), {"messages": [USER], name: {"a": 1}}, unknown_fields=unknown_fields
        )
        assert (status, error["error"]["param"]) == (400, name)


async def test_a_tool_that_is_run_elsewhere_is_not_offered(connect: Any) -> None:
    llm, hosted = scripted("ok"), {"type": "web_search", "user_location": {"city": "Kyiv"}}
    body = {"messages": [USER], "tools": [hosted, TOOL]}
    assert (await ask(connect, llm, body))[:2] == (200, {"tools.web_search"})
    assert "web_search" not in prompt(llm)
    assert '"f"' in prompt(llm)
    status, _, error = await ask(connect, scripted("ok"), body | {"tool_choice": "required"})
    assert (status, error["error"]["param"]) == (400, "tools.0.type")
    status, _, error = await ask(connect, scripted("ok"), body | {"tools": [{"type": "function"}]})
    assert (status, error["error"]["param"]) == (400, "tools.0.function")


async def test_switches_of_thinking_are_dropped_where_nothing_thinks(connect: Any) -> None:
    switches = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": False}}
    assert (await ask(connect, scripted("ok"), {"messages": [USER], **switches}))[:2] == (
        200, {"reasoning_effort", "chat_template_kwargs.enable_thinking"},
    )  # fmt: skip


async def test_the_header_that_names_dropped_fields_is_short(connect: Any) -> None:
    body = {"messages": [USER]} | {f"{i:03}{'x' * 70}": 1 for i in range(300)} | {"\r\nx-evil: 1": 1}
    answer = await connect(scripted("ok")).post("/v1/chat/completions", json=body)
    header = answer.headers["x-lmkit-warnings"]
    assert answer.status_code == 200
    assert len(header) <= 1024
    assert header.startswith("dropped: 000xxx")
    assert header.endswith(", ...")


DEEP: Any = 1
for _ in range(129):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "extra", [DEEP, {str(i): 1 for i in range(1 << 15)}, [[]] * (1 << 15)], ids=["deep", "wide", "many"]
)
@pytest.mark.parametrize(
    ("path", "within"),
    [("/v1/chat/completions", None), ("/v1/chat/completions", "stream_options"), ("/api/chat", "options"),
     ("/v1/messages", "metadata"), ("/v1/responses", None), ("/inference/v1/generate", "sampling_params"),
     ("/v1/embeddings", None), ("/v1/completions", "user")],
)  # fmt: skip
async def test_dropped_fields_are_bounded(connect: Any, path: str, within: str | None, extra: Any) -> None:
    body = {within: {"x": extra}} if within is not None else {"x": extra}
    answer = await connect(scripted("ok")).post(path, json=body)
    assert answer.status_code == 400
    assert "more than" in answer.text


async def test_dropped_fields_are_counted_and_remembered(connect: Any) -> None:
    client = connect(scripted("ok"))
    body = {"messages": [USER], "user": "u", "nobody_knows": 1}
    answer = await client.post("/v1/chat/completions", json=body)
    story = (await client.get(f"/debug/requests/{answer.json()['id']}")).json()
    assert story["dropped_fields"] == ["nobody_knows", "user"]
    metrics = (await client.get("/metrics")).text
    for field in ("nobody_knows", "user"):
        assert f'lmkit_dropped_fields_total{{field="{field}",route="/v1/chat/completions"}} 1.0' in metrics


async def test_only_the_end_of_a_long_prompt_is_read(connect: Any) -> None:
    llm = scripted("ok", max_length=100)
    for limit, length in ((10, 10), (-1, 98), (99, 99)):
        body = {"prompt": "x" * 150 + "y", "truncate_prompt_tokens": limit, "max_tokens": 2 if limit < 99 else 1}
        response = await connect(llm).post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        assert len(prompt(llm)) == length
        assert prompt(llm).endswith("y")
    assert (await connect(llm).post("/v1/completions", json={"prompt": "x" * 150})).status_code == 400


async def test_usage_in_every_chunk_needs_include_usage(connect: Any) -> None:
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": [USER]})):
        options = {"continuous_usage_stats": True}
        response = await connect(scripted("abc")).post(path, json={**body, "stream": True, "stream_options": options})
        assert response.status_code == 200
        assert "usage" not in response.text


async def test_answers_and_chunks_have_a_fingerprint(connect: Any) -> None:
    found = set()
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": [USER]})):
        found.add((await connect(scripted("abc")).post(path, json=body)).json()["system_fingerprint"])
        streamed = (await connect(scripted("abc")).post(path, json={**body, "stream": True})).text
        lines = [line for line in streamed.split("\n\n") if line.startswith("data: {")]
        found.update(json.loads(line[6:])["system_fingerprint"] for line in lines)
    (fingerprint,) = found
    assert fingerprint.startswith("fp_")


async def test_a_byte_order_mark_before_a_body_is_ignored(connect: Any) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "x"}), ("/invocations", {"prompt": "x"}), ("/tokenize", {"prompt": "x"}),
        ("/api/generate", {"model": "scripted", "prompt": "x"}), ("/v1/responses", {"input": "x"}),
    ):  # fmt: skip
        content = b"\xef\xbb\xbf" + json.dumps(body).encode()
        assert (await connect(scripted("ok")).post(path, content=content)).status_code == 200, path


async def test_the_blank_at_the_end_of_a_bad_word_counts(connect: Any) -> None:
    llm = scripted("ok")
    await connect(llm).post("/v1/completions", json={"prompt": "x", "bad_words": ["42 ", " no"]})
    (request,) = llm.client.requests  # type: ignore[attr-defined]
    decode = llm.text.tokenizer.decode
    banned = [decode(ids) for ids in request.params.extra["bad_words"]["ids"]]
    assert banned == ["42 ", " 42 ", "no", " no"]


async def test_usage_in_every_chunk(connect: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "x", "stream": True, "stream_options": options}
    response = await connect(scripted("abc")).post("/v1/completions", json=body)
    chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks[:3]] == [1, 2, 3]
    assert all(chunk["usage"]["prompt_tokens"] == 1 for chunk in chunks)


async def test_request_ids_come_back(connect: Any) -> None:
    client = connect(scripted("ok"))
    for given, header in (({"request_id": "mine"}, {}), ({}, {"X-Request-Id": "mine"})):
        response = await client.post("/v1/completions", json={"prompt": "x", **given}, headers=header)
        assert response.headers["x-request-id"] == "mine"
    response = await client.post("/v1/completions", json={"prompt": "x", "request_id": "a\r\nb: c"})
    assert response.headers["x-request-id"] == response.json()["id"]


async def test_tokens_by_their_ids(connect: Any) -> None:
    body = {"messages": [USER], "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    _, _, answer = await ask(connect, scripted("a"), body)
    (entry,) = answer["choices"][0]["logprobs"]["content"][:1]
    (token,) = scripted("a").text.tokenizer.encode("a", add_special=False)
    assert entry["token"] == f"token_id:{token}"
    assert entry["top_logprobs"][0]["token"].startswith("token_id:")


THINKS = "{{ messages[-1].content }}{% if enable_thinking %}[on]{% else %}[off]{% endif %}"
SWITCHED: list[tuple[dict[str, Any], str]] = [
    ({"reasoning_effort": "none"}, "[off]"), ({"reasoning_effort": "high"}, "[on]"),
    ({"enable_thinking": False}, "[off]"), ({"enable_thinking": True}, "[on]"),
    ({"thinking": {"type": "disabled"}}, "[off]"), ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "[on]"),
    ({"thinking": False}, "[off]"), ({"thinking": {"type": "auto"}}, "[off]"),
    ({"reasoning": {"effort": "low"}}, "[on]"), ({"reasoning": {"enabled": False}}, "[off]"),
    ({"chat_template_kwargs": {"enable_thinking": True}}, "[on]"),
]  # fmt: skip


@pytest.mark.parametrize(("switch", "seen"), SWITCHED, ids=str)
async def test_switches_of_thinking_under_all_their_names(connect: Any, switch: dict[str, Any], seen: str) -> None:
    llm = scripted("ok")
    llm.text = replace(llm.text, renderer=Renderer(THINKS, {}))
    status, named, error = await ask(connect, llm, {"messages": [USER], **switch})
    assert (status, named) == (200, set()), error
    assert prompt(llm) == f"Hello{seen}"
