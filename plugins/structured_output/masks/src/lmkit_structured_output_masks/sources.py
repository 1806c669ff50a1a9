"""Reading the sources of grammars, for their backends: JSON, choices, and what JSON schemas are made of.

Source: JSON Schema draft 2020-12, core (sections 8 to 11) and validation; older drafts where they assert something.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lmkit.api import GrammarError

MAX_CHOICES = 10_000

_ONE = frozenset({
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "extends", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
_LIST = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items", "extends", "disallow", "type"})
_MAP = frozenset({
    "$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties",
})  # fmt: skip

# keywords that restrict what an instance may be, of all drafts
ASSERTIONS = _ONE | _LIST | (_MAP - {"$defs", "definitions"}) | frozenset({
    "$dynamicRef", "$recursiveRef", "$ref", "const", "dependentRequired", "divisibleBy", "enum", "exclusiveMaximum",
    "exclusiveMinimum", "format", "maxContains", "maxItems", "maxLength", "maxProperties", "maximum", "minContains",
    "minItems", "minLength", "minProperties", "minimum", "multipleOf", "pattern", "required", "uniqueItems",
}) - {"contentSchema"}  # fmt: skip


def json_of(text: str, max_depth: int) -> Any:
    """The value of a JSON text that is nested at most so deep. Raises GrammarError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise GrammarError(f"it is not JSON: {str(e)[:200]}") from None
    level, depth = [value], 0
    while level := [v for item in level for v in _children(item)]:
        depth += 1
        if depth > max_depth:
            raise GrammarError(f"it is nested deeper than {max_depth}")
    return value


def choices_of(source: str) -> list[str]:
    """The texts of a grammar of the kind `choice`. Raises GrammarError."""
    choices = json_of(source, 1)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise GrammarError("a choice is a JSON list of texts that are not empty")
    if len(choices) > MAX_CHOICES:
        raise GrammarError(f"{len(choices)} choices, at most {MAX_CHOICES} are possible")
    return choices


def subschemas(schema: object) -> Iterator[Mapping[str, Any]]:
    """`schema` and every schema inside it that is an object. Names of properties are no keywords."""
    stack = [schema]
    while stack:
        here = stack.pop()
        if not isinstance(here, Mapping):
            continue
        yield here
        for key, value in here.items():
            if key in _MAP and isinstance(value, Mapping):
                stack.extend(value.values())
            elif key in _LIST and isinstance(value, list):
                stack.extend(value)
            elif key in _ONE:
                stack.append(value)


def keywords(schema: object) -> frozenset[str]:
    """The keywords in use that restrict an instance. Annotations and unknown words are left out, as the draft says."""
    return frozenset(key for part in subschemas(schema) for key in part if key in ASSERTIONS)


def _children(value: Any) -> list[Any]:
    return [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
