"""Reading JSON schemas, for grammar backends: where the subschemas are, and which keywords they use.

Source: JSON Schema draft 2020-12, core (sections 8 to 11) and validation; older drafts where they assert something.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
