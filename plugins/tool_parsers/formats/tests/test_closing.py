"""Closed schemas let through only what the schema they were made of does."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit_formats import closed

A = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = A | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, CLOSED),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED}),
        ({"properties": {"b": A}}, {"properties": {"b": CLOSED}, "additionalProperties": False}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, {"$ref": "#/$defs/A", "$defs": {"A": CLOSED}}),
        # what says it itself, or would be left with nothing
        *((schema, schema) for schema in (
            A | {"additionalProperties": True}, A | {"additionalProperties": {"type": "string"}},
            A | {"patternProperties": {"x": {}}}, A | {"required": ["b"]}, A | {"minProperties": 2},
            {"type": "object"}, True, {"allOf": [A, {"properties": {"b": {}}}]}, {"not": A}, {"oneOf": [A, A]},
            A | {"anyOf": [{"required": ["b"]}]}, {"not": {"$ref": "#/$defs/A"}, "$defs": {"A": A}},
            A | {"enum": [{"b": 1}]},
        )),
    ],
)  # fmt: skip
def test_what_is_closed(schema: Any, expected: Any) -> None:
    assert closed(schema) == expected


KEYS = st.sampled_from("abc")
VALUES = st.recursive(
    st.integers(0, 2) | st.none(),
    lambda v: st.lists(v, max_size=2) | st.dictionaries(KEYS, v, max_size=3),
    max_leaves=6,
)


def combined(inner: Any) -> Any:
    several = st.lists(inner, min_size=1, max_size=2)
    return st.fixed_dictionaries({}, optional={
        "type": st.sampled_from(["object", "array", "integer"]), "properties": st.dictionaries(KEYS, inner, max_size=2),
        "required": st.lists(KEYS, max_size=2, unique=True), "additionalProperties": st.booleans() | inner,
        "items": inner, "anyOf": several, "oneOf": several, "allOf": several, "not": inner, "if": inner, "then": inner,
        "else": inner, "minProperties": st.integers(0, 3), "enum": st.lists(VALUES, min_size=1, max_size=2),
        "$ref": st.sampled_from(["#/$defs/a", "#/$defs/b"]),
    })  # fmt: skip


PARTS = st.recursive(st.just({}) | st.booleans() | st.just(A), combined, max_leaves=6)
LEAVES = st.just(A) | st.just({"properties": {"b": {}}})


@settings(deadline=None, max_examples=300)
@given(PARTS, LEAVES, LEAVES, st.lists(VALUES, max_size=8))
def test_it_is_never_wider(part: Any, first: Any, second: Any, values: list[Any]) -> None:
    schema = {"properties": {"a": part}, "$defs": {"a": first, "b": second}}
    before, after = (jsonschema.Draft202012Validator(s) for s in (schema, closed(schema)))
    for value in values:
        assert before.is_valid(value) or not after.is_valid(value)
