"""Conformance, and what is particular to llguidance: its structural tags and its refusals."""

from __future__ import annotations

import json
import random
import re

import pytest
from lmkit.api import Grammar, GrammarError
from lmkit_grammar_llguidance.backend import LlGuidance
from lmkit_testing import GrammarConformance
from lmkit_testing.grammars import allowed_ids, byte_vocabulary, generates, try_out


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
        ({"type": "json_schema", "json_schema": {"uniqueItems": True}}, "uniqueItems"),
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
        ("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}', "x-guidance"),
        ("json_schema", '{"$ref": "#"}', "leads back to itself"),
        ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}',
         "leads back to itself"),
        ("json_schema", '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}', "nothing satisf"),
        ("json_schema", '{"type": "array", "items": {"$ref": "#"}, "minItems": 1}', "nothing satisfies"),
        ("json_schema", '{"$ref": "https://localhost/schema.json"}', "another document"),
        ("json_schema", '{"oneOf": [{"type": "number"}, {"type": "integer"}]}', "told apart"),
        ("json_schema", '{"minProperties": 2}', "minProperties"),
        ("json_schema", '{"type": "array", "items": {"type": "string"}, "uniqueItems": true}', "few known values"),
        ("json_schema", "false", "false"),
        ("json_schema", '{"const": "a\\u0000b"}', "control characters"),
        ("regex", "(?=x)a", "look-ahead"),
        ("lark", '%llguidance {"no_forcing": true}\nstart: "a"', "options"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused(backend, kind, source, word):
    with pytest.raises(GrammarError, match=word):
        backend.compile(Grammar(kind, source))


def nested(depth: int, inner: dict) -> dict:
    for _ in range(depth):
        inner = {"type": "object", "properties": {"a": inner}, "required": ["a"], "additionalProperties": False}
    return inner


@pytest.mark.parametrize("depth", [40, 100, 120])
def test_deep_schemas(backend, depth):
    schema = nested(depth, {"type": "string", "not": {"const": "x"}})
    compiled = backend.load(backend.compile(Grammar("json_schema", json.dumps(schema))))
    assert writes(compiled, '{"a":' * depth + '"y"' + "}" * depth)
    assert not writes(compiled, '{"a":' * depth + '"x"' + "}" * depth)
    with pytest.raises(GrammarError, match="deeper"):
        backend.compile(Grammar("json_schema", json.dumps(nested(300, {}))))


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


OBJECT = {"type": "object", "additionalProperties": False}
AB = {**OBJECT, "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, ["[1,1]"], ["[true]"]),
        ({"type": "string", "format": "path"}, ['"/a b"'], ["1"]),
        ({"type": "string", "format": "odd"}, ['"x"'], ["1"]),
        ({"type": "number", "divisibleBy": 3}, ["9"], ["8"]),
        ({"disallow": ["string", "null"]}, ["8"], ['"a"', "null"]),
        ({"extends": {"type": "integer"}, "minimum": 3}, ["3"], ["2", '"a"']),
        ({"type": ["string", {"const": 5}]}, ['"a"', "5"], ["6"]),
        ({"type": "number", "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),
        ({"type": "object", "properties": {"a": {"type": "integer", "required": True}}}, ['{"a":1}'], ["{}"]),
        ({"type": "string", "minLength": 2.0}, ['"ab"'], ['"a"']),
        ({"items": [{"type": "integer"}], "additionalItems": False, "type": "array"}, ["[1]", "[]"], ["[1,2]",
         '["a"]']),
        ({**AB, "minProperties": 1}, ['{"a":1}', '{"b":1}', '{"a":1,"b":2}'], ["{}"]),
        ({**AB, "minProperties": 2}, ['{"a":1,"b":2}'], ["{}", '{"a":1}']),
        ({**AB, "maxProperties": 1}, ["{}", '{"b":1}'], ['{"a":1,"b":2}']),
        ({**AB, "minProperties": 1, "required": ["a"]}, ['{"a":1}'], ["{}", '{"b":1}']),
        ({"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": {"type": "integer"}},
         ["{}", '{"x":1}', '{"y":2}'], ['{"z":1}', '{"x":"a"}']),
        ({"type": "object", "propertyNames": {"pattern": "^[a-z]+$", "maxLength": 3}}, ['{"ab":1}'], ['{"A":1}',
         '{"abcd":1}']),
        ({"type": "object", "propertyNames": {"type": "string"}}, ['{"a":1}'], ["1"]),
        ({"type": "object", "propertyNames": {"not": {"const": "x"}}}, ['{"xy":1}', '{"a":1}'], ['{"x":1}']),
        ({**AB, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, ['{"a":1}', '{"b":1}'], ["{}", '{"a":1,"b":2}']),
        ({"oneOf": [{"type": "string"}, {"type": "null"}, {"type": "array"}]}, ['"a"', "null", "[]"], ["1"]),
        ({"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}, ['"a"', '"c"'], ['"b"']),
        ({"oneOf": [{"type": "string"}, {"type": "string", "enum": ["x", "yz"]}]}, ['"y"', '"xx"', '""'], ['"x"',
         '"yz"']),
        ({"oneOf": [{"type": "number", "maximum": 5}, {"type": "number", "minimum": 3}]}, ["2", "6"], ["3", "4", "5"]),
        ({"oneOf": [{**AB, "required": ["a"]}, {"type": "object", "properties": {"k": {"const": 1}},
         "required": ["k"]}]},
         ['{"a":1}', '{"k":1}'], ['{"b":1}']),
        ({"oneOf": [{"$ref": "#/definitions/x"}, {"$ref": "#/definitions/y"}],
          "definitions": {"x": {"type": "object", "properties": {"t": {"const": "x"}}, "required": ["t"]},
                          "y": {"type": "object", "properties": {"t": {"enum": ["y"]}}, "required": ["t"]}}},
         ['{"t":"x"}', '{"t":"y"}'], ['{"t":"z"}', "{}"]),
        ({"not": {"type": ["string", "object", "array"]}}, ["1", "null", "true"], ['"a"', "{}"]),
        ({"type": "string", "not": {"enum": ["ab", "a"]}}, ['""', '"abc"', '"b"'], ['"a"', '"ab"']),
        ({"type": "integer", "not": {"const": 3}}, ["2", "4", "33"], ["3"]),
        ({"type": "integer", "not": {"minimum": 3}}, ["2"], ["3", "4"]),
        ({**AB, "not": {"required": ["a", "b"]}}, ["{}", '{"a":1}', '{"b":1}'], ['{"a":1,"b":2}']),
        ({**AB, "not": {"anyOf": [{"required": ["a"]}, {"properties": {"b": {"const": 1}}, "required": ["b"]}]}},
         ["{}", '{"b":2}'], ['{"a":1}', '{"b":1}']),
        ({"type": "string", "not": {"pattern": "^x-"}}, ['"x"', '"ax-"', '""'], ['"x-"', '"x-a"']),
        ({"enum": ["a", 1, None, [1], {"b": 2}], "not": {"type": "string"}}, ["1", "null", "[1]", '{"b":2}'], ['"a"']),
        ({**AB, "if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}},
         ["{}", '{"a":2}', '{"a":1,"b":1}'], ['{"a":1}']),
        ({**AB, "if": {"required": ["a"]}, "else": {"required": ["b"]}}, ['{"a":1}', '{"b":1}'], ["{}"]),
        ({**AB, "dependentRequired": {"a": ["b"]}}, ["{}", '{"b":1}', '{"a":1,"b":1}'], ['{"a":1}']),
        ({**AB, "dependencies": {"a": ["b"], "b": {"required": ["a"]}}}, ["{}", '{"a":1,"b":1}'], ['{"a":1}',
         '{"b":1}']),
        ({**AB, "dependentSchemas": {"a": False}}, ["{}", '{"b":1}'], ['{"a":1}']),
        ({"type": "array", "contains": {"const": 7}, "items": {"type": "integer"}}, ["[7]", "[1,7,2]"], ["[]", "[1]"]),
        ({"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
         ["[]", '["c","a"]', '["b","c","a"]'], ['["a","a"]', '["a","b","a"]', '["d"]']),
        ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 2}, ["[true,false]"],
         ["[true]", "[true,true]"]),
        ({"allOf": [{"properties": {"a": {"type": "integer"}}}], "unevaluatedProperties": False, "type": "object"},
         ["{}", '{"a":1}'], ['{"b":1}', '{"a":"x"}']),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/n", "type": "string",
          "definitions": {"n": {"type": "integer"}}}, ["1"], ['"a"']),
        ({"$id": "http://host/root.json", "$ref": "part.json#/$defs/n", "$defs": {
            "p": {"$id": "part.json", "$defs": {"n": {"type": "integer"}}}}}, ["1"], ['"a"']),
    ],
)  # fmt: skip
def test_keywords_are_enforced_in_other_words(backend, schema, good, bad):
    compiled = backend.load(backend.compile(Grammar("json_schema", json.dumps(schema))))
    for text in good:
        assert writes(compiled, text), text
    for text in bad:
        assert not writes(compiled, text), text


def test_a_tag_holds_its_schema_in_the_same_way(backend):
    schema = {**AB, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}
    compiled = tagged(backend, {**TAG, "content": {"type": "json_schema", "json_schema": schema}})
    assert writes(compiled, '<f>{"a":1}</f>')
    assert not writes(compiled, '<f>{"a":1,"b":1}</f>')


@pytest.mark.parametrize("num", [1, 2_000, 10_000])
def test_many_choices(backend, num):
    texts = [f"number {i * 7919 % 10_007} of {num}" for i in range(num)]
    compiled = backend.load(backend.compile(Grammar("choice", json.dumps(texts))))
    assert writes(compiled, texts[0])
    assert writes(compiled, texts[-1])
    assert not writes(compiled, texts[-1][:-1])
    texts = texts[-3_000:]  # a text may have no more than that many of them
    either = {"type": "or", "elements": [TAG, {"type": "or", "elements": [
        {"type": "const_string", "value": text} for text in texts]}]}  # fmt: skip
    compiled = tagged(backend, either)
    assert writes(compiled, texts[-1])
    assert writes(compiled, "<f>{}</f>")
    assert not writes(compiled, "number x")


DOUBLED = "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(60)) + '\na60: "x"'


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("lark", DOUBLED),
        ("json_schema", '{"type": "array", "items": {"enum": [1, 2]}, "minItems": 100000000000000000000}'),
    ],
)
def test_what_is_too_much_is_refused_before_it_is_used(backend, kind, source):
    """When it is compiled, or at the latest in the walk with which the compiling process tries it out."""
    with pytest.raises(GrammarError) as caught:
        try_out(backend.load(backend.compile(Grammar(kind, source))), 258, (256,), 10.0)
    assert not re.search(r"\w/\w+\.\w+:\d", caught.value.message)


@pytest.mark.parametrize("seed", range(4))
def test_a_bounded_pattern_beside_a_length(seed):
    """With tokens of several characters, as a model has them."""
    extra = [b"ab", b"abc", b"abcde", b"abcdefgh", b'"a', b'c"', b'"}', b'": "']
    backend = LlGuidance(byte_vocabulary("<|end|>", extra=extra))
    for pattern, length in (("^[a-z]{2,8}$", 5), ("[a-z]{2,8}", 5), ("^(ab){1,9}$", 6), ("^[a-z]{2,8}[0-9]{1,4}$", 4)):
        part = {"type": "string", "pattern": pattern, "maxLength": length}
        schema = {"type": "object", "properties": {"k": part}, "required": ["k"], "additionalProperties": False}
        matcher = backend.load(backend.compile(Grammar("json_schema", json.dumps(schema)))).matcher()
        source, text = random.Random(seed), b""
        while not matcher.complete:
            allowed = allowed_ids(matcher, 265, (264,))
            assert allowed, text
            token = source.choice(sorted(allowed))
            assert matcher.accept([token]) == 1
            text += ([bytes([i]) for i in range(256)] + extra)[token]
        value = json.loads(text)["k"]
        assert len(value) <= length
        assert re.search(pattern, value)
