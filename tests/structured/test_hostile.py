"""Grammars that a stranger sends to a server: each is answered in full or refused with 400, and harms nobody else."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from .conftest import random_model

LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
DOUBLED = "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(60)) + '\na60: "x"'


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "boolean"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


REFUSED = {
    "a reference that leads to itself": {"json": LOOP},
    "nothing finite satisfies it": {"json": ENDLESS},
    "2^60 words": {"grammar": DOUBLED},
    "150 MB in 14 bytes": {"regex": "(a{1000}){400}"},
    "nested 300 deep": {"json": nested(300)},
}
TAKEN = {
    "10,000 choices": {"choice": [f"{i * 7919 % 10_007} of 10000" for i in range(10_000)]},
    "a length beside a pattern": {"json": {"type": "string", "pattern": "^[a-z]{2,8}$", "maxLength": 5}},
    "nested 20 deep": {"json": nested(20)},
}


async def ask(http: httpx.AsyncClient, **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "hello " * 60}], "max_tokens": 300, "seed": 1,
            "chat_template_kwargs": {"enable_thinking": False}, **more}  # fmt: skip
    return await http.post("/v1/chat/completions", json=body)


async def test_hostile_grammars_are_refused_and_nobody_else_is_harmed() -> None:
    async with random_model() as http:
        first = (await ask(http, max_tokens=4)).json()
        others = [ask(http, max_tokens=20, seed=i) for i in range(4)]
        found = await asyncio.gather(*(ask(http, structured_outputs=g) for g in (*REFUSED.values(), *TAKEN.values())),
                                     *others)  # fmt: skip
        for name, response in zip(REFUSED, found, strict=False):
            assert response.status_code == 400, f"{name}: {response.text}"
            assert "/project/" not in response.text
            assert "python" not in response.text
        for (name, wanted), response in zip(TAKEN.items(), found[len(REFUSED) :], strict=False):
            assert response.status_code == 200, f"{name}: {response.text}"
            choice = response.json()["choices"][0]
            if choice["finish_reason"] == "stop":
                content = choice["message"]["content"]
                assert content in wanted["choice"] if "choice" in wanted else json.loads(content) is not None
        assert all(response.status_code == 200 for response in found[-len(others) :])
        again = (await ask(http, max_tokens=4)).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "the prefix cache has been emptied"
        assert first["choices"][0]["message"] == again["choices"][0]["message"]


@pytest.mark.parametrize("depth", [60, 100])
async def test_deep_schemas_are_answered_at_once(depth: int) -> None:
    """Either way: what counts is that it does not keep the compiler busy."""
    async with random_model() as http:
        response = await asyncio.wait_for(ask(http, structured_outputs={"json": nested(depth)}), 60)
        assert response.status_code in (200, 400)
