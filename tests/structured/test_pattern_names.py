"""Patterns of property names that fit only a few: no grammar leads to a comma behind which no name is left."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from lmkit.api import Grammar
from lmkit_grammar_llguidance.backend import LlGuidance
from lmkit_grammar_llguidance.patterns import texts_of
from lmkit_testing.grammars import allowed_ids, byte_vocabulary, generates, try_out

END = 256
NUMBER, TEXT = {"type": "integer"}, {"type": "string", "maxLength": 1}
FEW = {  # patterns, and all names that fit
    "^score$": ["score"], "^(a|b)$": ["a", "b"], "^[ab]$": ["a", "b"], "^a{1,2}$": ["a", "aa"], "^a?b$": ["ab", "b"],
    "^x$|^y$": ["x", "y"], "^line[1-3]$": ["line1", "line2", "line3"], "^a\\.b$": ["a.b"],
    "^(?:a|b(?:c|d))$": ["a", "bc", "bd"],
}  # fmt: skip
MANY = [
    "score",
    "^score",
    "score$",
    "^a+$",
    "^.$",
    "^\\d$",
    "^[^a]$",
    "(",
    "^(a$",
    "^a|b$",
    "^[a-z]{3}$",
    "^a{99}b{99}[a-z]$[",
    "",
]


@pytest.mark.parametrize("pattern", FEW)
def test_a_pattern_that_names_what_is_listed_anyway(pattern: str) -> None:
    names = FEW[pattern]
    backend = LlGuidance(byte_vocabulary("<|end|>"))
    closed: dict[str, Any] = {"type": "object", "patternProperties": {pattern: NUMBER}, "additionalProperties": False}
    schemas = {
        "listed": {**closed, "properties": dict.fromkeys(names, NUMBER)},
        "required": {**closed, "properties": dict.fromkeys(names, NUMBER), "required": names},
        "listed otherwise": {**closed, "properties": {names[0]: {"minimum": 0}, "other": TEXT}},
        "not listed": closed,
        "in another part": {"allOf": [{"properties": {name: {"minimum": 0} for name in names}}, closed]},
        "within": {"type": "array", "items": {**closed, "properties": {names[0]: NUMBER}}},
    }
    for place, schema in schemas.items():
        compiled = backend.load(backend.compile(Grammar("json_schema", json.dumps(schema))))
        value: Any = dict.fromkeys(names, 1)
        text = json.dumps([value] if place == "within" else value)
        assert generates(compiled.matcher(), list(text.encode())), place
        wrong = json.dumps({"zz": 1}).encode()
        assert not generates(compiled.matcher(), list(wrong)), place
        for seed in range(8):
            assert ends(compiled, random.Random(seed)), place
        try_out(compiled, END + 1, (END,), 60.0)


def ends(compiled: Any, draw: random.Random) -> bool:
    """Whether a walk that prefers the shortest way comes to an end: no place on it is without a way on."""
    matcher = compiled.matcher()
    for _ in range(400):
        allowed = [token for token in allowed_ids(matcher, END + 1) if token != END]
        if not allowed:
            return bool(matcher.complete)
        assert matcher.accept([draw.choice(allowed)]) == 1
    return True


@pytest.mark.parametrize("pattern", FEW)
def test_all_texts_of_a_pattern(pattern: str) -> None:
    assert texts_of(pattern) == FEW[pattern]
    assert all(re.search(pattern, text) for text in FEW[pattern])


@pytest.mark.parametrize("pattern", MANY)
def test_other_patterns_are_left_alone(pattern: str) -> None:
    assert texts_of(pattern) is None
