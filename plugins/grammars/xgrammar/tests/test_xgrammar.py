"""Conformance, and the refusals that xgrammar itself does not make."""

from __future__ import annotations

import json

import pytest
from lmkit.api import Grammar, GrammarError
from lmkit_testing import GrammarConformance
from lmkit_testing.grammars import byte_vocabulary, generates

pytest.importorskip("xgrammar", reason="xgrammar is not part of the default set")

from lmkit_grammar_xgrammar.backend import XGrammar


class TestXGrammar(GrammarConformance):
    plugin = "grammar:xgrammar"


@pytest.fixture(scope="module")
def backend() -> XGrammar:
    return XGrammar(byte_vocabulary("<|end|>", "<call>"))


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {}},
        {"type": "array", "uniqueItems": True},
        {"type": "string", "format": "email"},
        {"type": "string", "pattern": "(?=a)"},
        {"type": "string", "pattern": "a$b"},
        {"type": "string", "pattern": "(^a|b)"},
        {"type": "string", "pattern": "a", "maxLength": 3},
        {"enum": ["a", 3], "maxLength": 1},
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}, "maxLength": 1},
        {"type": "object", "required": ["a"]},
        {"allOf": [{"type": "string"}]},
        {"const": "a\u0000b"},
    ],
    ids=json.dumps,
)
def test_what_would_not_be_enforced_is_refused(backend, schema):
    with pytest.raises(GrammarError):
        backend.compile(Grammar("json_schema", json.dumps(schema)))


@pytest.mark.parametrize("regex", ["a$b", "(a+)+$(a+)+$", "a^", "^a|^b"])
def test_anchors_that_would_be_passed_over_are_refused(backend, regex):
    with pytest.raises(GrammarError, match="start of a pattern only"):
        backend.compile(Grammar("regex", regex))


@pytest.mark.parametrize("regex", ["^a$", r"a\$b", "[$^]b", "a[^b]"])
def test_other_signs_of_the_kind_are_not(backend, regex):
    backend.compile(Grammar("regex", regex))


def test_structural_tags(backend):
    number = {"type": "json_schema", "json_schema": {"type": "integer"}}
    call = {"type": "tag", "begin": "<f>", "content": number, "end": "</f>"}
    tag = {
        "type": "structural_tag",
        "format": {"type": "or", "elements": [call, {"type": "const_string", "value": "no"}]},
    }
    compiled = backend.load(backend.compile(Grammar("structural_tag", json.dumps(tag))))
    assert generates(compiled.matcher(), b"<f>12</f>")
    assert generates(compiled.matcher(), b"no")
    assert not generates(compiled.matcher(), b"<f>x</f>")
    for bad in ({"not": {}}, {"type": "string", "format": "email"}):
        call["content"] = {"type": "json_schema", "json_schema": bad}
        with pytest.raises(GrammarError):
            backend.compile(Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": call})))
    call |= {"begin": "<call>", "content": number}
    with pytest.raises(GrammarError, match="control tokens"):
        backend.compile(Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": call})))
