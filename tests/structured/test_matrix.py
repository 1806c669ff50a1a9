"""{thinking on, off, absent} x {text, json_object, json_schema, regex, tools auto, required, named} x {stream, not}.

Whatever the model samples at temperature 1, the answer is what was asked for: content and arguments are valid, and the
thinking is kept apart. An answer that was cut off by max_tokens is the beginning of a valid one.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Mapping
from itertools import product
from typing import Any

import httpx
import jsonschema
import pytest
from lmkit.api import Grammar
from lmkit_grammar_llguidance.backend import LlGuidance
from lmkit_testing.grammars import byte_vocabulary

from .conftest import Model

HOME = {
    "type": "object",
    "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
    "required": ["zip"],
    "additionalProperties": False,
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, HOME]},
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
SUM = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": -9, "maximum": 99},
        "b": {"type": "number", "minimum": 0, "maximum": 9},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "add": SUM}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": s, "strict": True}} for n, s in SCHEMAS.items()]
REGEX = "[a-z]{2,4}-[0-9]{1,3}(\u00e9|!)"

THINKING: Mapping[str, dict[str, Any]] = {
    "on": {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 40},
    "off": {"chat_template_kwargs": {"enable_thinking": False}},
    "absent": {},
}
KINDS: Mapping[str, dict[str, Any]] = {
    "text": {},
    "json_object": {"response_format": {"type": "json_object"}},
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}},
    "regex": {"structured_outputs": {"regex": REGEX}},
    "auto": {"tools": TOOLS},
    "required": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "named": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}},
}
QUESTIONS = ("What is the weather in Paris?", "What is 2 + 3?", "Hello! Who are you?")


@pytest.mark.parametrize("per_cell", [pytest.param(1, id="half"), pytest.param(24, id="24", marks=pytest.mark.slow)])
async def test_the_matrix(model: Model, per_cell: int) -> None:
    """Quick, every cell is either streamed or not."""
    cells = list(product(THINKING, KINDS, (False, True)))
    cells = [cell for n, cell in enumerate(cells) if n % 4 in (0, 3)] if per_cell == 1 else cells
    counts: Counter[str] = Counter()
    async with model() as http:
        limit = asyncio.Semaphore(16)

        async def one(number: int, thinking: str, kind: str, stream: bool) -> None:
            async with limit:
                message, finish = await ask(http, number, thinking, kind, stream)
                check(message, finish, thinking, kind)
                counts[f"{kind} {finish}"] += 1

        jobs = [one(i * len(cells) + n, *cell) for i in range(per_cell) for n, cell in enumerate(cells)]
        await asyncio.gather(*jobs)
    assert sum(counts.values()) == per_cell * len(cells)
    print(f"\n{sum(counts.values())} answers at temperature 1:", dict(sorted(counts.items())))


async def ask(
    http: httpx.AsyncClient, number: int, thinking: str, kind: str, stream: bool, **more: Any
) -> tuple[dict[str, Any], str]:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}], "temperature": 1.0,
        "seed": number, "max_tokens": 300, "stream": stream, **THINKING[thinking], **KINDS[kind],
        **more,
    }  # fmt: skip
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    if not stream:
        choice = response.json()["choices"][0]
        return choice["message"], choice["finish_reason"]
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish = ""
    for line in response.text.split("\n\n"):
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line[6:])
        assert "error" not in chunk, chunk
        choice = chunk["choices"][0]
        finish = choice["finish_reason"] or finish
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls") or ():
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"function": {"name": call["function"]["name"], "arguments": ""}})
            message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"].get("arguments") or ""
    return message, finish


def check(message: dict[str, Any], finish: str, thinking: str, kind: str) -> None:
    content, calls = message.get("content") or "", message.get("tool_calls") or []
    where = f"{thinking} {kind} {finish}: {message}"
    if kind in ("text", "regex"):  # elsewhere a text inside the JSON may say so
        assert "<think>" not in content, where
    if thinking == "off":
        assert not message.get("reasoning_content"), where
    cut_off = finish == "length"
    if kind in ("json_object", "json_schema", "regex"):
        assert not calls, where
        if cut_off:
            assert begins(kind, content), where
        elif kind == "regex":
            assert re.fullmatch(REGEX, content), where
        else:
            jsonschema.validate(json.loads(content), PERSON if kind == "json_schema" else {"type": "object"})
    for i, call in enumerate(calls):
        function = call["function"]
        if kind == "text":
            raise AssertionError(where)
        if not (cut_off and i == len(calls) - 1):
            jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])
        if kind == "named":
            assert function["name"] == "add", where
    if kind in ("required", "named") and not cut_off:
        assert calls, where
        assert not content.strip(), where
        assert finish == "tool_calls", where
    if kind == "required":
        assert len(calls) <= 1, where


BACKEND = LlGuidance(byte_vocabulary("<|end|>"))
GRAMMARS = {
    "json_object": Grammar("json_object", ""),
    "json_schema": Grammar("json_schema", json.dumps(PERSON)),
    "regex": Grammar("regex", REGEX),
}


def begins(kind: str, content: str) -> bool:
    """Whether the content, but for a character that was cut in two, begins a sentence of the grammar."""
    matcher = BACKEND.load(BACKEND.compile(GRAMMARS[kind])).matcher()
    data = content.rstrip("\ufffd").encode()
    return matcher.accept(data) == len(data)
