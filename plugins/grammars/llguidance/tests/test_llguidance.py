"""Conformance, and what is particular to llguidance: its structural tags and its refusals."""

from __future__ import annotations

import json

import pytest
from lmkit.api import Grammar, GrammarError
from lmkit.testing import GrammarConformance
from lmkit.testing.grammars import byte_vocabulary, generates
from lmkit_grammar_llguidance.backend import LlGuidance


class TestLlGuidance(GrammarConformance):
    plugin = "grammar:llguidance"


@pytest.fixture(scope="module")
def backend() -> LlGuidance:
    return LlGuidance(byte_vocabulary("<|end|>", "<call>"))


def tagged(backend: LlGuidance, fmt: dict) -> object:
    source = json.dumps({"type": "structural_tag", "format": fmt})
    return backend.load(backend.compile(Grammar("structural_tag", source)))


def writes(compiled, text: str) -> bool:
    """`<call>` is one control token."""
    ids: list[int] = []
    for i, part in enumerate(text.split("<call>")):
        ids += [257] * (i > 0) + list(part.encode())
    return generates(compiled.matcher(), ids)


SCHEMA = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TAG = {"type": "tag", "begin": "<f>", "content": SCHEMA, "end": "</f>"}


@pytest.mark.parametrize(
    ("fmt", "good", "bad"),
    [
        ({"type": "const_string", "value": 'a"\n/'}, ['a"\n/'], ["a", ""]),
        ({"type": "regex", "pattern": "a/b|\\\\/"}, ["a/b", "\\/"], ["a"]),
        ({"type": "any_text"}, ["", "x\ny"], []),
        (TAG, ['<f>{"a": 1}</f>'], ['<f>{"a": "1"}</f>', "<f></f>", '{"a": 1}']),
        ({**TAG, "begin": "<call>", "end": "<call>"}, ['<call>{"a": 1}<call>'], ['{"a": 1}', '<call>{"a": 1}']),
        ({**TAG, "content": {"type": "any_text"}}, ["<f></f>", "<f>a</b></f>"], ["<f>", "<f></f></f>"]),
        ({"type": "sequence", "elements": [TAG, TAG]}, ['<f>{}</f><f>{"a": 2}</f>'], ["<f>{}</f>"]),
        ({"type": "or", "elements": [TAG, {"type": "const_string", "value": "no"}]}, ["no", "<f>{}</f>"], ["n", ""]),
        (
            {"type": "tags_with_separator", "tags": [TAG], "separator": ", ", "at_least_one": True},
            ["<f>{}</f>", "<f>{}</f>, <f>{}</f>"],
            ["", "<f>{}</f>,", "<f>{}</f><f>{}</f>"],
        ),
        (
            {"type": "tags_with_separator", "tags": [TAG], "separator": "", "stop_after_first": True},
            ["", "<f>{}</f>"],
            ["<f>{}</f><f>{}</f>"],
        ),
        (
            {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG]},
            ["", "hello < x", 'say <f>{"a": 1}</f> and <f>{}</f> done'],
            ["say <f>{", 'say <f>{"a": true}</f>', "<fx>"],
        ),
        (
            {"type": "triggered_tags", "triggers": ["<call>"], "at_least_one": True,
             "tags": [{**TAG, "begin": "<call>"}]},
            ["text <call>{}</f>", "<call>{}</f><call>{}</f>"],
            ["", "text", "<call>{}"],
        ),
    ],
)  # fmt: skip
def test_structural_tags(backend, fmt, good, bad):
    compiled = tagged(backend, fmt)
    for text in good:
        assert writes(compiled, text), text
    for text in bad:
        assert not writes(compiled, text), text


def test_the_older_form_of_structural_tags(backend):
    tag = {
        "type": "structural_tag",
        "structures": [{"begin": "<f=", "schema": SCHEMA["json_schema"], "end": ">"}],
        "triggers": ["<f"],
    }
    compiled = backend.load(backend.compile(Grammar("structural_tag", json.dumps(tag))))
    assert writes(compiled, 'well <f={"a": 3}> so')
    assert not writes(compiled, "well <f=[]> so")


@pytest.mark.parametrize(
    ("fmt", "word"),
    [
        ({"type": "tag", "begin": "<f>"}, "end"),
        ({"type": "regex", "pattern": 3}, "pattern"),
        ({"type": "sequence", "elements": []}, "elements"),
        ({"type": "json_schema", "json_schema": {"not": {}}}, "not"),
        ({"type": "json_schema", "json_schema": {"divisibleBy": 2}}, "divisibleBy"),
        ({"type": "json_schema", "json_schema": {"x-guidance": {"lenient": True}}}, "x-guidance"),
        ({"type": "any_text", "excludes": ["a"]}, "excludes"),
        ({"type": "triggered_tags", "triggers": ["<g"], "tags": [TAG]}, "no trigger"),
    ],
)
def test_bad_structural_tags_are_refused(backend, fmt, word):
    with pytest.raises(GrammarError, match=word):
        tagged(backend, fmt)


@pytest.mark.parametrize(
    ("kind", "source", "word"),
    [
        ("json_schema", '{"not": {}}', "not"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"type": "number", "divisibleBy": 3}', "divisibleBy"),
        ("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}', "x-guidance"),
        ("json_schema", '{"$ref": "#"}', "nothing satisfies it"),
        ("json_schema", "false", "false"),
        ("json_schema", '{"const": "a\\u0000b"}', "control characters"),
        ("regex", "(?=x)a", "look-ahead"),
        ("lark", '%llguidance {"no_forcing": true}\nstart: "a"', "options"),
    ],
)
def test_what_cannot_be_enforced_is_refused(backend, kind, source, word):
    with pytest.raises(GrammarError, match=word):
        backend.compile(Grammar(kind, source))


def test_deep_schemas_are_refused(backend):
    schema: dict = {"type": "string"}
    for _ in range(40):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    with pytest.raises(GrammarError, match="deeper"):
        backend.compile(Grammar("json_schema", json.dumps(schema)))


def test_recursive_schemas_work(backend):
    node = {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}, "additionalProperties": False}
    schema = {"$defs": {"n": node}, "$ref": "#/$defs/n"}
    compiled = backend.load(backend.compile(Grammar("json_schema", json.dumps(schema))))
    assert writes(compiled, '{"c": {"c": {}}}')
    assert not writes(compiled, '{"c": {"c": 1}}')


def test_a_property_is_not_written_twice_by_way_of_escapes(backend):
    compiled = backend.load(backend.compile(Grammar("json_schema", '{"properties": {"a": {"type": "integer"}}}')))
    assert writes(compiled, '{"a": 1, "b": "x"}')
    assert not writes(compiled, '{"a": 1, "\\u0061": "x"}')


def test_blanks_are_bounded(backend):
    compiled = backend.load(backend.compile(Grammar("json_object", "")))
    assert writes(compiled, '{\n    "a":  1\n}')
    assert not writes(compiled, "{" + " " * 40 + "}")


def test_property_names_are_no_keywords(backend):
    schema = {"type": "object", "properties": {"not": {"type": "string"}, "extends": {"enum": ["a"]}}}
    compiled = backend.load(backend.compile(Grammar("json_schema", json.dumps(schema))))
    assert writes(compiled, '{"not": "b", "extends": "a"}')
