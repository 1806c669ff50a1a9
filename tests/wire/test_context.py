"""Requests that want more tokens than the context has, in every dialect: outputs are cut, prompts are refused in the
words and with the code that the dialect's clients recognise."""

from __future__ import annotations

import re
from typing import Any

import httpx
import msgspec
import pytest
from lmkit.api import PoolerInfo
from lmkit_http.app import build_app
from lmkit_testing.serving import ServedLLM, scripted

LENGTH = 60  # tokens of the context
SAID = [{"role": "user", "content": "x"}]
LONG = "x" * 2 * LENGTH
# route -> body, the field that bounds the output, where the answer says why it ended, and what it says
OUTPUTS: dict[str, tuple[dict[str, Any], str, tuple[Any, ...], str]] = {
    "/v1/chat/completions": ({"messages": SAID}, "max_tokens", ("choices", 0, "finish_reason"), "length"),
    "/v1/completions": ({"prompt": "x"}, "max_tokens", ("choices", 0, "finish_reason"), "length"),
    "/v1/responses": ({"input": "x"}, "max_output_tokens", ("incomplete_details", "reason"), "max_output_tokens"),
    "/v1/messages": ({"messages": SAID, "model": "scripted"}, "max_tokens", ("stop_reason",), "max_tokens"),
    "/api/chat": ({"messages": SAID, "model": "scripted", "stream": False}, "num_predict", ("done_reason",), "length"),
    "/api/generate": ({"prompt": "x", "model": "scripted", "stream": False}, "num_predict", ("done_reason",), "length"),
    "/inference/v1/generate": (
        {"token_ids": [1]}, "sampling_params", ("choices", 0, "finish_reason"), "length",
    ),
    "/invocations": ({"messages": SAID}, "max_completion_tokens", ("choices", 0, "finish_reason"), "length"),
}  # fmt: skip
OPENAI = re.compile(
    r"This model's maximum context length is 60 tokens\. However, your prompt has (\d+) tokens\. Please "
)
ANTHROPIC = re.compile(r"^prompt is too long: (\d+) tokens > 60 maximum$")
OLLAMA = re.compile(r"^the input length exceeds the context length: (\d+) tokens > 60$")
PROMPTS: dict[str, tuple[dict[str, Any], str | None, re.Pattern[str]]] = {  # body, field in the error, words
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": LONG}]}, "messages", OPENAI),
    "/v1/completions": ({"prompt": LONG}, "prompt", OPENAI),
    "/v1/responses": ({"input": LONG}, "input", OPENAI),
    "/v1/messages": ({"messages": [{"role": "user", "content": LONG}], "max_tokens": 5}, None, ANTHROPIC),
    "/v1/messages/count_tokens": ({"messages": [{"role": "user", "content": LONG}]}, None, ANTHROPIC),
    "/api/chat": ({"model": "scripted", "messages": [{"role": "user", "content": LONG}]}, None, OLLAMA),
    "/api/generate": ({"model": "scripted", "prompt": LONG}, None, OLLAMA),
    "/inference/v1/generate": ({"token_ids": [1] * 200, "sampling_params": {"max_tokens": 1}}, "token_ids", OPENAI),
    "/v1/embeddings": ({"input": LONG}, "input", OPENAI),
    "/rerank": ({"query": "x", "documents": [LONG]}, "documents", OPENAI),
    "/api/embed": ({"model": "scripted", "input": LONG, "truncate": False}, None, OLLAMA),
}


async def post(llm: ServedLLM, route: str, body: dict[str, Any]) -> httpx.Response:
    transport = httpx.ASGITransport(build_app(llm))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.post(route, json=body)


@pytest.mark.parametrize("most", [10_000, 1 << 40, -1])
@pytest.mark.parametrize("route", OUTPUTS)
async def test_an_output_is_cut_to_what_is_left_of_the_context(route: str, most: int) -> None:
    body, field, path, reason = OUTPUTS[route]
    if field == "num_predict":
        bound: dict[str, Any] = {"options": {field: most}}
    else:
        bound = {field: {"max_tokens": most} if field == "sampling_params" else most}
    llm = scripted("abcdefghij" * 20, max_length=LENGTH)
    answer = await post(llm, route, body | bound)
    assert answer.status_code == 200, answer.text
    value = answer.json()
    for key in path:
        value = value[key]
    assert value == reason
    (request,) = llm.client.requests  # type: ignore[attr-defined]
    assert request.params.max_tokens == LENGTH - len(request.token_ids)


@pytest.mark.parametrize("route", PROMPTS)
async def test_a_prompt_that_is_too_long_is_refused_in_the_words_of_the_api(route: str) -> None:
    body, field, words = PROMPTS[route]
    llm = scripted("ok", max_length=LENGTH)
    if route in ("/v1/embeddings", "/rerank", "/api/embed"):
        llm.client.facts = msgspec.structs.replace(llm.facts, pooler=PoolerInfo("embed", 4))  # type: ignore[misc]
    answer = await post(llm, route, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    found = words.search(message)
    assert found, message
    assert int(found[1]) > LENGTH
    if words is OPENAI:
        assert (error["code"], error["param"], error["type"]) == (
            "context_length_exceeded", field, "invalid_request_error",
        )  # fmt: skip


async def test_a_huge_ceiling_of_the_output_does_not_cut_the_prompt() -> None:
    llm = scripted("ok", max_length=LENGTH)
    body = {"prompt": LONG, "truncate_prompt_tokens": -1, "max_tokens": 10_000}
    assert (await post(llm, "/v1/completions", body)).status_code == 200
    (request,) = llm.client.requests  # type: ignore[attr-defined]
    assert len(request.token_ids) == LENGTH - 1


@pytest.mark.parametrize("route", OUTPUTS)
async def test_top_p_0_is_the_likeliest_token(route: str) -> None:
    body, field, *_ = OUTPUTS[route]
    top = {"max_tokens": 5, "top_p": 0} if field == "sampling_params" else {"top_p": 0}
    bound = {"options": top} if field == "num_predict" else {field: top} if field == "sampling_params" else top
    if route == "/v1/messages":
        bound["max_tokens"] = 5
    llm = scripted("ok", max_length=LENGTH)
    answer = await post(llm, route, body | bound)
    assert answer.status_code == 200, answer.text
    (request,) = llm.client.requests  # type: ignore[attr-defined]
    assert (request.params.top_p, request.params.top_k) == (1.0, 1)
