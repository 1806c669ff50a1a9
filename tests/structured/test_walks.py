"""Whatever the masks of a JSON schema allow ends in JSON that a validator takes: random walks over schemas as people
write them, and over a few that use each keyword in its hard places."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from lmkit.api import Grammar, GrammarError
from lmkit_grammar_llguidance.backend import LlGuidance
from lmkit_testing.grammars import allowed_ids, byte_vocabulary

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
OPENAPI = DATA / "wire" / "openai-openapi.yaml.gz"
VOCABULARY = byte_vocabulary(
    "<|end|>", extra=[b'": ', b'", "', b'"}', b"ab", b"abcdefgh", b"00", b"true", b'{"', b"]]", b"}}"]
)
END = VOCABULARY.eos_token_ids[0]
BACKEND = LlGuidance(VOCABULARY)
STEPS, HURRY = 1500, 100  # tokens of a walk; after how many it takes what closes something
KEY = {"type": "string", "minLength": 1, "maxLength": 4}
TREE = {"type": "object", "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["v"], "additionalProperties": False}  # fmt: skip
SHAPES = [{"type": "object", "properties": {"kind": {"const": k}, "size": {"type": "integer"}}, "required": ["kind"]}
          for k in ("circle", "square", "line")]  # fmt: skip
ANY_OF_THREE = {"type": "object", "properties": {k: {"type": "integer"} for k in "abc"}, "additionalProperties": False}

HARD: dict[str, Any] = {
    "tree": TREE,
    "shapes": {"type": "array", "items": {"oneOf": SHAPES}, "minItems": 1, "maxItems": 3},
    "overlapping oneOf": {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 9}]},
    "oneOf required": {**ANY_OF_THREE, "oneOf": [{"required": ["a"]}, {"required": ["b", "c"]}]},
    "oneOf beside anyOf": {**ANY_OF_THREE, "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
                           "anyOf": [{"required": ["c"]}, {"properties": {"c": False}}]},
    "oneOf lists": {"oneOf": [{"type": "array", "items": {"type": "integer"}},
                              {"type": "array", "items": {"type": "string"}}]},
    "not enum": {"type": "string", "maxLength": 3, "not": {"enum": ["", "a", "ab", "abc"]}},
    "not required": {**ANY_OF_THREE, "not": {"required": ["a", "b"]}},
    "not object": {"not": {"type": "object", "required": ["a"]}},
    "not anyOf": {**ANY_OF_THREE, "not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}},
    "if": {**ANY_OF_THREE, "if": {"properties": {"a": {"minimum": 5}}, "required": ["a"]},
           "then": {"required": ["b"]}, "else": {"required": ["c"]}},
    "many ifs": {"type": "object", "properties": {"t": {"enum": ["x", "y", "z"]}, "u": {"type": "integer"}},
                 "required": ["t"], "additionalProperties": False, "allOf": [
                     {"if": {"properties": {"t": {"const": t}}}, "then": {"required": ["u"]}} for t in ("x", "y")]},
    "dependencies": {**ANY_OF_THREE, "dependencies": {"a": ["b"], "b": {"properties": {"c": {"minimum": 3}}}}},
    "min and max": {**ANY_OF_THREE, "minProperties": 1, "maxProperties": 2},
    "maxProperties": {"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1},
    "minProperties": {"type": "object", "minProperties": 1, "additionalProperties": KEY},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^[a-z]{1,3}$"}, "additionalProperties": KEY},
    "names by enum": {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "minProperties": 1},
    "names not": {"type": "object", "propertyNames": {"not": {"enum": ["a", "b"]}}, "additionalProperties": KEY},
    "contains": {"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 100}, "maxItems": 4},
    "maxContains": {"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 100}, "maxContains": 1,
                    "maxItems": 4},
    "unique": {"type": "array", "items": {"enum": ["a", "b", "c", 1, None]}, "uniqueItems": True, "minItems": 2},
    "unique of many": {"type": "array", "items": {"enum": [*range(40)]}, "uniqueItems": True},
    "unevaluated": {"allOf": [{"type": "object", "properties": {"a": KEY}}], "unevaluatedProperties": False},
    "length and pattern": {"type": "string", "pattern": "^[a-z]{2,8}$", "maxLength": 5},
    "prefix": {"type": "array", "prefixItems": [{"type": "integer"}, KEY], "items": False, "minItems": 1},
    "draft 4": {"$schema": "http://json-schema.org/draft-04/schema#", "type": "object", "required": ["n"],
                "properties": {"n": {"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 9}},
                "additionalProperties": False},
    "draft 7 tuple": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array",
                      "items": [{"type": "integer"}], "additionalItems": {"type": "boolean"}, "maxItems": 3},
    "formats": {"type": "object", "properties": {"a": {"type": "string", "format": "path", "maxLength": 3},
                                                 "b": {"type": "string", "format": "date"}}, "required": ["a", "b"],
                "additionalProperties": False},
    "mixed enum": {"enum": ["a", 1, 2.5, None, True, [1], {"a": 1}]},
    "types": {"type": ["string", "null", "integer"], "maxLength": 3, "minimum": 3},
    "siblings of a reference": {"$defs": {"k": KEY}, "$ref": "#/$defs/k", "minLength": 2},
    "allOf": {"allOf": [{"type": "object", "properties": {"a": KEY}, "required": ["a"]},
                        {"type": "object", "properties": {"b": KEY}, "required": ["b"]}]},
    "anyOf with siblings": {"type": "object", "properties": {"a": KEY}, "required": ["a"],
                            "anyOf": [{"properties": {"b": {"const": 1}}, "required": ["b"]}, {"maxProperties": 1}]},
    "patterns": {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
    "multipleOf": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    "anything": {}, "true": True,
}  # fmt: skip


def walk(schema: Any, seed: int) -> tuple[str, bool]:
    """A text as the masks allow it, and whether it is whole."""
    matcher = BACKEND.load(BACKEND.compile(Grammar("json_schema", json.dumps(schema)))).matcher()
    source, text = random.Random(seed), b""
    for step in range(STEPS):
        allowed = sorted(allowed_ids(matcher, VOCABULARY.size, (END,)))
        if matcher.complete and (not allowed or source.random() < 0.3):
            return text.decode(errors="replace"), True
        assert allowed, f"nothing may follow {text!r}"
        closing = [t for t in allowed if VOCABULARY.pieces[t][:1] in b'"}]']
        blank = [t for t in allowed if VOCABULARY.pieces[t] not in (b" ", b"\n", b"\r", b"\t")]
        token = source.choice(closing if closing and (step > HURRY or source.random() < 0.3) else blank or allowed)
        assert matcher.accept([token]) == 1, text
        text += VOCABULARY.pieces[token]
    return text.decode(errors="replace"), False


def fits(schema: Any, seeds: range) -> int:
    """How many walks came to an end; each that did is valid."""
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    num = 0
    for seed in seeds:
        text, whole = walk(schema, seed)
        num += whole
        if whole:
            validator.validate(json.loads(text))
    return num


@pytest.mark.parametrize("name", HARD)
def test_hard_schemas(name: str) -> None:
    assert fits(HARD[name], range(4)) >= 3


def published() -> Iterator[Any]:
    """The schemas of the OpenAI API, each with those that it names: words of 3.0 and 3.1, recursion, long enums."""
    with gzip.open(OPENAPI, "rt", encoding="utf-8") as file:
        parts = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["components"]["schemas"]
    for name in sorted(parts):
        wanted, found = [name], {}
        while wanted:
            here = wanted.pop()
            if here not in found and here in parts:
                found[here] = parts[here]
                text = json.dumps(parts[here], default=str)
                wanted += [ref.partition('"')[0] for ref in text.split('"#/components/schemas/')[1:]]
        yield json.loads(
            json.dumps({"$ref": f"#/components/schemas/{name}", "components": {"schemas": found}}, default=str)
        )


def tools() -> Iterator[Any]:
    """Arguments of tools, of the function calling leaderboard."""
    for path in sorted((DATA / "bfcl").glob("*.json")):
        if path.name.endswith(".answers.json"):
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            for function in json.loads(line)["function"]:
                yield json.loads(json.dumps(function["parameters"]).replace('"dict"', '"object"').replace(
                    '"float"', '"number"').replace('"tuple"', '"array"').replace('"any"', '"string"'))  # fmt: skip


@pytest.mark.skipif(not OPENAPI.is_file(), reason="needs ../shared/data/wire")
@pytest.mark.slow
def test_published_schemas() -> None:
    refused, schemas = {}, list(published())
    for schema in schemas:
        try:
            fits(schema, range(1))
        except GrammarError as error:
            refused[schema["$ref"]] = error.message
    assert len(refused) <= len(schemas) / 20, refused


@pytest.mark.skipif(not (DATA / "bfcl").is_dir(), reason="needs ../shared/data/bfcl")
@pytest.mark.parametrize("step", [pytest.param(80, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)])
def test_tools(step: int) -> None:
    refused, schemas = {}, list(tools())[::step]
    for schema in schemas:
        try:
            fits(schema, range(1))
        except GrammarError as error:
            refused[json.dumps(schema)[:80]] = error.message
    assert len(refused) <= len(schemas) / 20, refused
