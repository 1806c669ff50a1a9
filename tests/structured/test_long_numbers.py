"""Numbers beyond 2^53 in schemas: whatever a grammar lets through fits the schema to the last digit."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from lmkit.api import Grammar, GrammarBackend, GrammarError
from lmkit_testing.grammars import generates

from .conftest import demo_model
from .test_wrong_forms import DOORS, asked
from .test_wrong_forms import backend as backend

EDGE = 2**53
LONG = EDGE + 1  # the first whole number that is no double
IDS = (1140000000000000001, 1140000000000000003)
INT64, UINT64 = 2**63 - 1, 2**64 - 1
AT_ONCE = 2000  # neighbours of a bound that a double may be instead


def holds(schema: dict[str, Any], value: int) -> bool:
    if "const" in schema:
        return bool(value == schema["const"])
    if "enum" in schema:
        return value in schema["enum"]
    low, high = schema.get("minimum", -(10**40)), schema.get("maximum", 10**40)
    above, below = schema.get("exclusiveMinimum", -(10**40)), schema.get("exclusiveMaximum", 10**40)
    return low <= value <= high and above < value < below and value % schema.get("multipleOf", 1) == 0


SCHEMAS: tuple[dict[str, Any], ...] = (
    {"const": LONG}, {"const": -LONG}, {"const": EDGE}, {"const": 10**20 + 1}, {"const": INT64},
    {"enum": list(IDS)}, {"enum": [1, IDS[0]]}, {"type": "integer", "enum": [EDGE, EDGE + 2]},
    {"type": "integer", "minimum": LONG, "maximum": LONG + 2},
    {"type": "integer", "minimum": LONG}, {"type": "integer", "maximum": -LONG},
    {"type": "integer", "exclusiveMinimum": EDGE, "exclusiveMaximum": EDGE + 2},
    {"type": "integer", "exclusiveMinimum": EDGE}, {"type": "integer", "exclusiveMaximum": LONG, "minimum": 0},
    {"type": "integer", "minimum": 0, "maximum": INT64}, {"type": "integer", "minimum": -INT64 - 1, "maximum": INT64},
    {"type": "integer", "minimum": 0, "maximum": UINT64}, {"type": "integer", "minimum": IDS[0], "maximum": IDS[1]},
    {"type": "number", "minimum": LONG, "maximum": LONG + 2}, {"type": "integer", "minimum": 0, "multipleOf": LONG},
    {"type": "integer", "minimum": 2**60, "maximum": 2**60 + 2**20}, {"type": "integer", "minimum": 10**30},
)  # fmt: skip
PLACES = {
    "at the top": lambda s: (s, "{}"),
    "in a property": lambda s: (
        {"type": "object", "properties": {"a": s}, "required": ["a"], "additionalProperties": False}, '{{"a": {}}}'
    ),
    "in a definition of a list": lambda s: (
        {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1, "$defs": {"n": s}}, "[{}]"
    ),
    "in a part": lambda s: ({"allOf": [s]}, "{}"),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_what_is_written_fits(backend: GrammarBackend, schema: dict[str, Any], place: str) -> None:
    whole, text = PLACES[place](schema)
    try:
        compiled = backend.load(backend.compile(Grammar("json_schema", json.dumps(whole))))
    except GrammarError:
        return  # refused by name: nothing untrue is written
    edges = [v for value in schema.values() for v in (value if isinstance(value, list) else [value])]
    numbers = {edge for edge in edges if isinstance(edge, int)}
    draw = random.Random(0)
    near = {n + d for n in numbers for d in (-2, -1, 0, 1, 2, draw.randrange(AT_ONCE), -draw.randrange(AT_ONCE))}
    rounded = {int(float(n)) for n in numbers} | {0, UINT64 + 1, -INT64 - 2}
    for value in sorted(near | rounded):
        if generates(compiled.matcher(), list(text.format(value).encode())):
            assert holds(schema, value), value


def test_what_can_be_said_exactly_is_taken(backend: GrammarBackend) -> None:
    good: tuple[tuple[dict[str, Any], tuple[int, ...]], ...] = (
        ({"const": EDGE}, (EDGE,)),
        ({"type": "integer", "minimum": 0, "maximum": EDGE}, (0, 7, EDGE)),
        ({"type": "integer", "minimum": 0, "maximum": INT64}, (0, 7, LONG, 10**18)),
        ({"type": "integer", "minimum": -INT64 - 1, "maximum": INT64}, (0, -LONG, IDS[0])),
        ({"type": "integer", "minimum": LONG}, (LONG + 1, 10 * LONG)),
        ({"type": "integer", "minimum": 2**60, "maximum": 2**60 + 2**20}, (2**60, 2**60 + 1, 2**60 + 2**20)),
    )
    for schema, values in good:
        compiled = backend.load(backend.compile(Grammar("json_schema", json.dumps(schema))))
        for value in values:
            assert generates(compiled.matcher(), list(str(value).encode())), (schema, value)


def test_llguidance_says_which_number_it_cannot_keep() -> None:
    module = pytest.importorskip("lmkit_grammar_llguidance.backend", reason="llguidance is not installed")
    from lmkit_testing.grammars import byte_vocabulary

    guidance = module.LlGuidance(byte_vocabulary("<|end|>"))
    for schema, said in (({"const": 10**20 + 1, "type": "object"}, "2^53"),
                         ({"type": "integer", "minimum": LONG, "maximum": LONG + 2}, str(LONG))):  # fmt: skip
        with pytest.raises(GrammarError) as refused:
            guidance.compile(Grammar("json_schema", json.dumps(schema)))
        assert said in refused.value.message


async def test_every_door_keeps_the_digits() -> None:
    """A number that a grammar cannot keep is refused with all its digits, wherever the schema comes from."""
    schema = {"type": "object", "properties": {"a": {"type": "integer", "const": LONG}}, "required": ["a"]}
    async with demo_model() as http:
        for door in DOORS:
            path, body = asked(door, schema)
            response = await http.post(path, json=body)
            assert response.status_code == 400, (door, response.text[:300])
            assert str(LONG) in response.text, (door, response.text[:300])
