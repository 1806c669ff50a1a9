"""The table of fields (docs/reference/fields.md) says what happens: each field is sent to each route."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from lmkit_http.app import build_app
from lmkit_testing.serving import scripted

TABLE = Path(__file__).parents[4] / "docs" / "reference" / "fields.md"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
LEAST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
}  # fmt: skip

# a value that says something, with what it needs beside it; 1 where it is left out
SAMPLES: dict[str, Any] = {
    "model": "scripted", "messages": [{"role": "user", "content": "y"}], "prompt": "y", "echo": True, "stop": "z",
    "stream": True, "logit_bias": {"1": 1}, "user": "u", "stop_token_ids": [1], "ignore_eos": True, "store": True,
    "include_stop_str_in_output": True, "skip_special_tokens": False, "cache_salt": "s", "return_token_ids": True,
    "resume": True, "vllm_xargs": {"no_repeat_ngram": {"size": 3}}, "truncation_side": "left",
    "return_tokens_as_token_ids": True, "request_id": "r", "session_id": "s", "bad_words": ["no"],
    "allowed_token_ids": [1], "response_format": {"type": "text"},
    "tools": [TOOL], "parallel_tool_calls": True, "metadata": {"a": "b"}, "safety_identifier": "s",
    "prompt_cache_key": "k", "prompt_cache_retention": "24h", "service_tier": "flex", "include_reasoning": True,
    "use_beam_search": True, "length_penalty": {"use_beam_search": True, "length_penalty": 2},
    "early_stopping": {"use_beam_search": True, "early_stopping": "never"},
    "add_generation_prompt": True, "add_special_tokens": True,
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "top_logprobs": {"logprobs": True, "top_logprobs": 1}, "tool_choice": {"tools": [TOOL], "tool_choice": "auto"},
    "structured_outputs": {"structured_outputs": {"regex": "a"}},
    "continue_final_message": {"messages": [{"role": "assistant", "content": "x"}], "continue_final_message": True},
}  # fmt: skip
TOGETHER = (
    "length_penalty",
    "early_stopping",
    "stream_options",
    "top_logprobs",
    "tool_choice",
    "structured_outputs",
    "continue_final_message",
)
# honoured by templates that read them, which the one of the tests does not
READ = {"chat_template_kwargs": {"x": 1}, "documents": [{"text": "x"}], "reasoning_effort": "low"}


def rows() -> Iterator[tuple[str, str, str]]:
    """(field, route, state)"""
    lines = [line.strip("| ").split(" | ") for line in TABLE.read_text().split("\n## ")[0].splitlines() if "| " in line]
    routes = [route.strip("`") for route in lines[0][1:]]
    for name, *states in lines[1:]:
        yield from ((name.strip("`"), route, state.strip()) for route, state in zip(routes, states, strict=False))


@pytest.mark.parametrize(("name", "route", "state"), [row for row in rows() if row[2]])
async def test_each_field_does_what_the_table_says(name: str, route: str, state: str) -> None:
    value = SAMPLES.get(name, READ.get(name, True if name == "logprobs" and "chat" in route else 1))
    extra = value if name in TOGETHER else {name: value}
    if state == "refused":
        extra = {name: {"a": 1}}
    transport = httpx.ASGITransport(build_app(scripted("ok")))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        response = await client.post(route, json=LEAST[route] | extra)
    named = response.headers.get("x-lmkit-warnings", "").removeprefix("dropped: ").split(", ")
    if state == "refused":
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)
    elif name in READ:
        assert "template" in response.text
    else:
        assert response.status_code == 200, response.text
        assert (name in named) == (state == "dropped")


def test_every_route_is_in_the_table() -> None:
    assert {route for _, route, _ in rows()} == set(LEAST)
