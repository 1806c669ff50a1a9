"""Keywords of JSON schemas whose values have a wrong form: all backends and all doors refuse them by name."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import pytest
from lmkit.api import Grammar, GrammarBackend, GrammarError, checked_schema
from lmkit_testing.grammars import byte_vocabulary

from .conftest import demo_model

SCHEMAS, NAMES, COUNTS = ("schemas", "names", "counts")
NULL, NUMBER, TEXT, LIST, OBJECT, TRUE = None, 5, "x", [[]], {"y": 5}, True
NO_SCHEMA = (NUMBER, TEXT, LIST, [5])
NO_LIST_OF_SCHEMAS = (NUMBER, TEXT, LIST, [None], OBJECT, TRUE, [5, {}])
NO_MAP_OF_SCHEMAS = (NUMBER, TEXT, LIST, [], OBJECT, TRUE, {"y": None}, {"y": [{}]})
NO_COUNT = (-1, 1.5, TEXT, LIST, OBJECT, TRUE, 1e400)
NO_NUMBER = (TEXT, LIST, OBJECT, 1e400, float("nan"))
NO_TEXT = (NUMBER, LIST, OBJECT, TRUE)
WRONG: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("additionalProperties", "contains", "else", "if", "not", "propertyNames", "then",
                     "unevaluatedItems", "unevaluatedProperties"), NO_SCHEMA),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), NO_LIST_OF_SCHEMAS),
    **dict.fromkeys(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"), NO_MAP_OF_SCHEMAS),
    **dict.fromkeys(("maxContains", "maxItems", "maxLength", "maxProperties", "minContains", "minItems", "minLength",
                     "minProperties"), NO_COUNT),
    **dict.fromkeys(("maximum", "minimum"), (*NO_NUMBER, TRUE)),
    **dict.fromkeys(("exclusiveMaximum", "exclusiveMinimum"), NO_NUMBER),
    **dict.fromkeys(("multipleOf", "divisibleBy"), (*NO_NUMBER, TRUE, 0, -2)),
    **dict.fromkeys(("$ref", "format", "pattern"), NO_TEXT),
    "const": (float("nan"), [1e400]),
    "dependencies": (NUMBER, TEXT, LIST, [], OBJECT, {"y": [[]]}),
    "dependentRequired": (NUMBER, TEXT, LIST, [], OBJECT, {"y": "x"}, {"y": [{}]}, {"y": [None]}),
    "enum": (NUMBER, TEXT, OBJECT, TRUE, [float("inf")]),
    "items": (NUMBER, TEXT, LIST, [5]),
    "required": (NUMBER, TEXT, LIST, [{}], [None], [5], OBJECT),
    "type": (NUMBER, LIST, [], [5], TRUE),
    "uniqueItems": (NUMBER, TEXT, LIST, OBJECT),
}  # fmt: skip
CASES = [(key, value) for key, values in WRONG.items() for value in values]
PLACES = {
    "at the top": lambda schema: schema,
    "in a property": lambda schema: {"type": "object", "properties": {"p": schema}},
    "in a definition": lambda schema: {"properties": {"p": {"$ref": "#/$defs/d"}}, "$defs": {"d": schema}},
    "in an option": lambda schema: {"anyOf": [{"type": "array", "items": schema}]},
}  # fmt: skip


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def backend(request: pytest.FixtureRequest) -> GrammarBackend:
    module = pytest.importorskip(
        f"lmkit_grammar_{request.param}.backend", reason=f"{request.param} is not installed", exc_type=ImportError
    )
    made: GrammarBackend = getattr(module, {"llguidance": "LlGuidance", "xgrammar": "XGrammar"}[request.param])(
        byte_vocabulary("<|end|>")
    )
    return made


@pytest.mark.parametrize("place", PLACES)
def test_the_backends_name_the_keyword(backend: GrammarBackend, place: str) -> None:
    for key, value in CASES:
        schema = PLACES[place]({"type": "object", "properties": {"a": {"type": "integer"}}, key: value})
        with pytest.raises(GrammarError) as refused:
            backend.compile(Grammar("json_schema", json.dumps(schema)))
        assert key in refused.value.message, (key, value, refused.value.message)
        tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
        with pytest.raises(GrammarError) as refused:
            backend.compile(Grammar("structural_tag", json.dumps(tag)))
        assert key in refused.value.message, (key, value, refused.value.message)


def test_what_encoders_make_of_empty_lists_says_nothing(backend: GrammarBackend) -> None:
    plain = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    expected = backend.compile(Grammar("json_schema", json.dumps(plain)))
    for key in (key for key in WRONG if key not in ("const", "type", "properties", "additionalProperties")):
        for schema in ({**plain, key: None}, {**plain, "properties": {"a": {"type": "integer", key: None}}}):
            assert backend.compile(Grammar("json_schema", json.dumps(schema))) == expected, key
    assert checked_schema({"properties": None, "const": None, "default": None}) == {"const": None, "default": None}
    assert checked_schema({"dependentRequired": {"a": None}}) == {"dependentRequired": {}}


def asked(door: str, schema: Any) -> tuple[str, dict[str, Any]]:
    message = {"role": "user", "content": "x"}
    tool = {"name": "f", "description": "", "parameters": schema}
    chat = {"model": "demo", "messages": [message], "max_tokens": 4}
    form = {"type": "json_schema", "name": "a", "schema": schema}
    match door:
        case "response_format":
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            return "/v1/chat/completions", {**chat, "response_format": form}
        case "structured_outputs":
            return "/v1/chat/completions", {**chat, "structured_outputs": {"json": schema}}
        case "strict tool":
            return "/v1/chat/completions", {
                **chat,
                "tools": [{"type": "function", "function": {**tool, "strict": True}}],
            }
        case "required tool":
            tools = [{"type": "function", "function": tool}]
            return "/v1/chat/completions", {**chat, "tools": tools, "tool_choice": "required"}
        case "ollama format":
            return "/api/chat", {"model": "demo", "messages": [message], "format": schema, "stream": False}
        case "responses text":
            return "/v1/responses", {"model": "demo", "input": "x", "text": {"format": form}, "max_output_tokens": 4}
        case "responses tool":
            tools = [{"type": "function", **tool, "strict": True}]
            return "/v1/responses", {"model": "demo", "input": "x", "tools": tools, "tool_choice": "required"}
        case "messages tool":
            tools = [{"name": "f", "input_schema": schema}]
            choice = {"type": "any"}
            return "/v1/messages", {**chat, "tools": tools, "tool_choice": choice}
    raise AssertionError(door)


DOORS = ("response_format", "structured_outputs", "strict tool", "required tool", "ollama format", "responses text",
         "responses tool", "messages tool")  # fmt: skip


async def test_every_door_answers_400_and_names_the_keyword() -> None:
    cases = [case for case in CASES if not {"Infinity", "NaN"} & set(re.findall(r"\w+", json.dumps(case)))]
    async with demo_model() as http:
        gate = asyncio.Semaphore(16)

        async def ask(door: str, key: str, value: Any) -> tuple[str, str, Any, httpx.Response]:
            schema = {"type": "object", "properties": {"a": {"type": "integer"}}, key: value}
            path, body = asked(door, schema)
            async with gate:
                return door, key, value, await http.post(path, json=body)

        found = await asyncio.gather(*(ask(door, key, value) for door in DOORS for key, value in cases))
        for door, key, value, response in found:
            assert response.status_code == 400, (door, key, value, response.status_code, response.text[:300])
            assert key in response.text, (door, key, value, response.text[:300])
        for door in DOORS:
            path, body = asked(door, {"type": "object", "properties": {"a": {"type": "integer"}}, "required": None})
            response = await http.post(path, json={**body, "max_tokens": 4} if "max_tokens" in body else body)
            assert response.status_code == 200, (door, response.text[:300])
