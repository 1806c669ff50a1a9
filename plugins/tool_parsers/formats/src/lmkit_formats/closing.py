"""Objects of a schema that lists properties have no others, unless it says so.

JSON Schema means the contrary, but who lists properties wants these, and a small model that may add keys does not stop
adding them. Whatever fits a closed schema fits the one it was made of: where closing a part could let more through, or
leave nothing to be said, the part stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# by which an object says itself what other keys it has, or what it is
_SAID = frozenset({
    "additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "dependentRequired",
    "dependencies", "enum", "const",
})  # fmt: skip
# with which several schemas have a say about one object, or the contrary of one counts
_UNSAFE = frozenset({"allOf", "not", "if", "oneOf", "dependentSchemas", "$dynamicRef", "extends", "contains"})
_COMBINED = _UNSAFE | {"anyOf", "$ref", "dependencies"}

_VALUES = frozenset({"const", "default", "example"})


def closed(schema: Any) -> Any:
    """A copy of the schema that says `additionalProperties: false` wherever it may."""
    words = frozenset(_words(schema))
    if words & _UNSAFE and "$ref" in words:  # what is referred to may stand anywhere
        return schema
    return _closed(schema)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    schema = {key: part for key, part in schema.items() if part is not None or key in _VALUES}  # encoders' empty lists
    made, properties = dict(schema), schema.get("properties")
    if _COMBINED.isdisjoint(schema):
        if isinstance(properties, Mapping):
            made["properties"] = {name: _closed(part) for name, part in properties.items()}
            if _may_close(schema, properties):
                made["additionalProperties"] = False
        if "items" in schema:
            made["items"] = _closed(schema["items"])
    elif _COMBINED & set(schema) == {"anyOf"} and not isinstance(properties, Mapping):
        branches = schema["anyOf"]
        made["anyOf"] = [_closed(part) for part in branches] if isinstance(branches, list) else branches
    for name in ("$defs", "definitions"):
        if isinstance(parts := schema.get(name), Mapping):
            made[name] = {key: _closed(part) for key, part in parts.items()}
    return made


def _may_close(schema: Mapping[str, Any], properties: Mapping[str, Any]) -> bool:
    required, least = schema.get("required"), schema.get("minProperties", 0)
    named = (
        isinstance(required, list) and all(isinstance(name, str) and name in properties for name in required)
        if required
        else True
    )
    return named and _SAID.isdisjoint(schema) and isinstance(least, int) and least <= len(properties)


def _words(schema: Any) -> Iterator[str]:
    """Every name of a member in it."""
    if isinstance(schema, Mapping):
        for name, part in schema.items():
            yield name
            yield from _words(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _words(part)
