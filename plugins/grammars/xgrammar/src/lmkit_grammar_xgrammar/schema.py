"""Which JSON schemas xgrammar keeps to the letter.

The library passes over keywords that it does not know, and over some that it knows where they stand beside others. What
is allowed here is what the official test suite shows to be enforced; everything else is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from lmkit.api import GrammarError, checked_schema
from lmkit_structured_output_masks.sources import keywords, subschemas

SUPPORTED = frozenset({
    "$ref", "additionalProperties", "anyOf", "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "items",
    "maxItems", "maxLength", "maximum", "minItems", "minLength", "minimum", "pattern", "prefixItems", "properties",
    "required", "type",
})  # fmt: skip
FORMATS = frozenset({
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer", "relative-json-pointer",
    "time", "uri", "uri-reference", "uri-template", "uuid",
})  # fmt: skip
MAX_BOUND = 10**15  # of numbers that need not be whole
_ALONE = ("$ref", "anyOf", "const", "enum")  # enforced only without other assertions beside them
_NUMBER = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_NEEDS = {
    **{key: {"integer", "number"} for key in _NUMBER},
    **{key: {"string"} for key in ("minLength", "maxLength", "pattern")},
    **{key: {"array"} for key in ("items", "prefixItems", "minItems", "maxItems")},
    **{key: {"object"} for key in ("properties", "required", "additionalProperties")},
}


def check_anchors(pattern: str) -> None:
    """Raises GrammarError where the library would pass over an anchor."""
    bare = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "x", pattern, flags=re.DOTALL)
    if "^" in bare[1:] or "$" in bare[:-1]:
        raise GrammarError("^ is supported at the start of a pattern only, and $ at its end")


def enforced(source: object) -> dict[str, Any]:
    """The schema as xgrammar enforces it. Raises GrammarError for what would not be enforced."""
    checked = checked_schema(source)
    if isinstance(checked, bool):
        checked = {} if checked else {"enum": []}
    schema: dict[str, Any] = _without_notes(checked)
    if unknown := keywords(schema) - SUPPORTED:
        raise GrammarError(f"keywords that are not supported: {', '.join(sorted(unknown))}")
    if re.search(r"(?<!\\)(\\\\)*\\u00[01]", json.dumps(schema)):
        raise GrammarError("control characters cannot be written")
    for part in subschemas(schema):
        _check_part(part)
    return schema


def _without_notes(schema: Any) -> Any:
    """The schema without formats that a validator does not look at: int64, double, password."""
    if isinstance(schema, list):
        return [_without_notes(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: part if key in ("const", "enum", "default", "examples") else _without_notes(part)
        for key, part in schema.items()
        if key != "format" or not isinstance(part, str) or part in FORMATS
    }


def _check_part(part: Mapping[str, Any]) -> None:
    used = keywords(part) & set(part)
    for key in _ALONE:
        beside = used - {key, "type"} if key in ("const", "enum") else used - {key}
        if key in used and beside:
            raise GrammarError(f"{key} beside {', '.join(sorted(beside))} is not supported")
    if old := [key for key in ("exclusiveMaximum", "exclusiveMinimum", "required") if isinstance(part.get(key), bool)]:
        raise GrammarError(f"{old[0]} of old drafts (true or false) is not supported")
    stated = part.get("type")
    types = frozenset(stated if isinstance(stated, list) else [stated])
    for key in sorted(used & set(_NEEDS)):
        if not types & _NEEDS[key] or types - _NEEDS[key] - {"null"}:
            raise GrammarError(f"{key} is supported with type {' or '.join(sorted(_NEEDS[key]))} only")
    bounds = [part[key] for key in _NUMBER & used]
    if "number" in types and any(abs(bound) > MAX_BOUND for bound in bounds):
        raise GrammarError(f"bounds of numbers beyond {MAX_BOUND} are not supported: the library rounds them")
    for value in part.get("enum", [part.get("const")]):
        if _is_long(value):
            raise GrammarError(f"{value}: whole numbers beyond 64 bits are not supported")
    if ("const" in used or "enum" in used) and "type" in used:
        values = part["enum"] if "enum" in used else [part["const"]]
        if not all(any(_is(value, kind) for kind in types) for value in values):
            raise GrammarError("enum and const with values of another type are not supported")
    if "pattern" in used:
        if used & {"minLength", "maxLength"}:
            raise GrammarError("pattern beside minLength or maxLength is not supported")
        if re.search(r"\\[^dDwWsS.^$*+?()\[\]{}|/\\-]|\(\?", str(part["pattern"])):
            raise GrammarError("this pattern is not supported: groups with ?, classes and references by \\")
        check_anchors(str(part["pattern"]))
    reference = part.get("$ref")
    if reference is not None and not (isinstance(reference, str) and reference.startswith("#/")):
        raise GrammarError("$ref is supported to definitions in the schema only")
    missing = set(part.get("required", ())) - set(part.get("properties", {}))
    if missing:
        raise GrammarError(f"required properties must be among the properties: {', '.join(sorted(missing))}")


def _is_long(value: object) -> bool:
    if isinstance(value, (dict, list)):
        return any(map(_is_long, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and abs(value) >= 2**63


def _is(value: object, kind: object) -> bool:
    types: dict[object, tuple[type, ...]] = {
        "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    }  # fmt: skip
    return isinstance(value, types.get(kind, ())) and (kind == "boolean" or not isinstance(value, bool))
