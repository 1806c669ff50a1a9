"""The matrix on a model that says what it is told: good answers come through as they are, bad ones end well.

All requests of a test share the batch of one engine, so each answer also proves that its neighbours left it alone.
"""

from __future__ import annotations

import asyncio
import json
from itertools import product
from typing import Any

import pytest

from .conftest import scripted_model
from .test_matrix import KINDS, THINKING, ask, check

ANN = '{"name": "Ann", "age": 7, "tags": ["a"], "home": {"zip": "12345"}}'
ADD = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
PARIS = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris", "unit": "C"}}</tool_call>'
ANSWERS = {  # what the model wants to say, its content, the names of its calls
    "text": ("Well, <b>hello</b>! {", "Well, <b>hello</b>! {", []),
    "json_object": ('{"a": "<tool_call>{}</tool_call>", "b": "</think>"}',) * 2 + ([],),
    "json_schema": (ANN, ANN, []),
    "regex": ("abc-12\u00e9", "abc-12\u00e9", []),
    "auto": (f"Let me see. {PARIS}{ADD}", "Let me see. ", ["get_weather", "add"]),
    "required": (PARIS, "", ["get_weather"]),
    "named": (ADD + ADD, "", ["add"]),
}
MULL = {"on": "mull\n</think>", "off": "", "absent": "<think>mull\n</think>"}  # before the answer
# With one token per byte "<" begins both; where a call must come and thinking only may, it is taken for the call.
CALLS_AT_ONCE = {("absent", "required"), ("absent", "named")}
CELLS = list(product(THINKING, KINDS, (False, True)))


def mull(thinking: str, kind: str) -> str:
    return "" if (thinking, kind) in CALLS_AT_ONCE else MULL[thinking]


async def answers(scripts: list[str], depth: int, **more: Any) -> list[tuple[dict[str, Any], str]]:
    """One for each cell, all at once. `scripts`: one for each cell."""
    async with scripted_model(scripts, depth) as http:
        jobs = [ask(http, n, *cell, **{"seed": n, "temperature": 0.0, **more}) for n, cell in enumerate(CELLS)]
        return await asyncio.gather(*jobs)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.one_in(2)
async def test_what_fits_comes_through(depth: int) -> None:
    found = await answers([mull(thinking, kind) + ANSWERS[kind][0] for thinking, kind, _ in CELLS], depth)
    for (thinking, kind, stream), (message, finish) in zip(CELLS, found, strict=True):
        where = f"{thinking} {kind} stream={stream} {finish}: {message}"
        _, content, names = ANSWERS[kind]
        calls = message.get("tool_calls") or []
        assert [call["function"]["name"] for call in calls] == names, where
        assert (message.get("content") or "") == content, where
        assert (message.get("reasoning_content") or "") == ("mull" if mull(thinking, kind) else ""), where
        assert finish == ("tool_calls" if names else "stop"), where
        if "add" in names:
            assert json.loads(calls[-1]["function"]["arguments"]) == {"a": 2, "b": 3}, where


WRONG = [
    "No! I say what I like. " * 20,
    pytest.param("{" * 300, marks=pytest.mark.full("lmkit-structured-output-masks")),
]


@pytest.mark.parametrize("answer", [*WRONG, "</think>" + ADD[:30] + "<think>" * 40])
@pytest.mark.one_in(2)
async def test_what_does_not_fit_is_kept_to_its_constraint(answer: str) -> None:
    found = await answers([mull(thinking, kind) + answer for thinking, kind, _ in CELLS], 1, max_tokens=200)
    for (thinking, kind, _), (message, finish) in zip(CELLS, found, strict=True):
        if kind not in ("text", "auto"):
            check(message, finish, thinking, kind)
        assert finish in ("stop", "length", "tool_calls")


@pytest.mark.full("lmkit-structured-output-masks")
async def test_thinking_without_end_ends_well() -> None:
    """Without a budget at max_tokens, with one when it is spent; the others get their whole answers."""
    cells = [(t, k, s) for t, k, s in CELLS if t != "off" and (t, k) not in CALLS_AT_ONCE]
    scripts = ["mull " * 100, "<think>" + "mull " * 100, *(ANSWERS[kind][0] for kind in KINDS)]
    async with scripted_model(scripts) as http:
        endless = [ask(http, 0, t, k, s, seed=0 if t == "on" else 1, max_tokens=120, thinking_token_budget=None)
                   for t, k, s in cells]  # fmt: skip
        bounded = [ask(http, 0, "on", k, s, seed=0, max_tokens=300, thinking_token_budget=20)
                   for k, s in product(KINDS, (False, True))]  # fmt: skip
        others = [ask(http, 0, "off", k, False, seed=2 + i) for i, k in enumerate(KINDS)]
        found = await asyncio.gather(*endless, *bounded, *others)
    for (message, finish), cell in zip(found, cells, strict=False):
        assert finish == "length", cell
        assert not message.get("content"), cell
        assert not message.get("tool_calls"), cell
        assert message["reasoning_content"] == ("mull " * 100)[: 120 - (0 if cell[0] == "on" else 7)], cell
    for message, finish in found[len(endless) : len(endless) + len(bounded)]:
        assert message["reasoning_content"] == "mull " * 4
        assert finish in ("stop", "length", "tool_calls")
    for (message, finish), kind in zip(found[len(endless) + len(bounded) :], KINDS, strict=True):
        assert (message.get("content") or "") == ANSWERS[kind][1]
        assert finish == ("tool_calls" if ANSWERS[kind][2] else "stop")
