"""Which form the keywords of a JSON schema have, of all drafts: what a grammar is made of is checked here first.

Source: JSON Schema, meta-schemas of drafts 3 to 2020-12.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from lmkit.contracts.errors import GrammarError

MAX_SCHEMA_DEPTH = 256  # levels of one JSON schema

_SCHEMA = "a schema (an object, true or false)"
_NAMES = "a list of names"
_LIST_OF_SCHEMAS, _MAP_OF_SCHEMAS = f"a list of which each is {_SCHEMA}", f"an object of which each value is {_SCHEMA}"


def _is_schema(value: object) -> bool:
    return isinstance(value, (Mapping, bool))


def _is_number(value: object) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and (type(value) is int or math.isfinite(value))
    )


def _is_count(value: object) -> bool:
    return _is_number(value) and value == int(value) and value >= 0  # type: ignore[operator, call-overload]


def _is_positive(value: object) -> bool:
    return _is_number(value) and value > 0  # type: ignore[operator]


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_schemas(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_schema, value))


def _is_types(value: object) -> bool:
    types = value if isinstance(value, list) else [value]
    return bool(types) and all(isinstance(kind, (str, Mapping)) for kind in types)


def _is_map(is_value: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, Mapping) and all(map(is_value, value.values()))


def _is_finite(value: object) -> bool:
    """JSON has no other numbers."""
    if isinstance(value, float):
        return math.isfinite(value)
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return all(map(_is_finite, parts))


_Parts = Callable[[Any, Callable[[Any], Any]], Any]  # the value of a keyword with each schema in it replaced


def _one(value: Any, read: Callable[[Any], Any]) -> Any:
    return read(value)


def _several(value: Any, read: Callable[[Any], Any]) -> Any:
    if not isinstance(value, list):
        return read(value) if _is_schema(value) else value
    return [read(part) if _is_schema(part) else part for part in value]


def _named(value: Any, read: Callable[[Any], Any]) -> Any:
    return {name: read(part) if _is_schema(part) else part for name, part in value.items()}


def _none(value: Any, read: Callable[[Any], Any]) -> Any:
    return value


_Form = tuple[str, Callable[[Any], bool], _Parts]  # what is expected, and a test of it
_FORMS: dict[str, _Form] = {
    **dict.fromkeys(
        ("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "not", "propertyNames",
         "then", "unevaluatedItems", "unevaluatedProperties"), (_SCHEMA, _is_schema, _one)
    ),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), (_LIST_OF_SCHEMAS, _is_schemas, _several)),
    **dict.fromkeys(
        ("items", "extends"), ("a schema, or a list of them", lambda v: _is_schema(v) or _is_schemas(v), _several)
    ),
    **dict.fromkeys(
        ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"),
        (_MAP_OF_SCHEMAS, _is_map(_is_schema), _named),
    ),
    **dict.fromkeys(
        ("maxContains", "maxItems", "maxLength", "maxProperties", "minContains", "minItems", "minLength",
         "minProperties"), ("a whole number of at least 0", _is_count, _none)
    ),
    **dict.fromkeys(("maximum", "minimum"), ("a number", _is_number, _none)),
    **dict.fromkeys(
        ("exclusiveMaximum", "exclusiveMinimum"),
        ("a number", lambda v: isinstance(v, bool) or _is_number(v), _none),  # true and false in draft 4
    ),
    **dict.fromkeys(("divisibleBy", "multipleOf"), ("a number above 0", _is_positive, _none)),
    **dict.fromkeys(
        ("$anchor", "$dynamicAnchor", "$dynamicRef", "$id", "$recursiveRef", "$ref", "$schema", "format", "pattern"),
        ("a text", lambda v: isinstance(v, str), _none),
    ),
    **dict.fromkeys(("disallow", "type"), ("the name of a type, or a list of them", _is_types, _several)),
    "const": ("a value of JSON", _is_finite, _none),
    "dependencies": (
        "an object of which each value is a list of names or a schema",
        _is_map(lambda v: _is_schema(v) or _is_names(v) or isinstance(v, str) or v is None),
        _named,
    ),
    "dependentRequired": (
        f"an object of which each value is {_NAMES}", _is_map(lambda v: _is_names(v) or v is None), _none
    ),
    "enum": ("a list of values", lambda v: isinstance(v, list) and _is_finite(v), _none),
    "required": (_NAMES, lambda v: isinstance(v, bool) or _is_names(v), _none),  # true and false in draft 3
    "uniqueItems": ("true or false", lambda v: isinstance(v, bool), _none),
}  # fmt: skip


def schema_keywords(schema: object) -> dict[str, Any]:
    """The keywords of one JSON schema but those that are null, which encoders make of empty lists; schemas in it stay
    as they are. Raises GrammarError that names a keyword whose value has a wrong form.
    """
    if not isinstance(schema, Mapping):
        raise GrammarError(f"a JSON schema is an object, true or false, not {_shown(schema)}")
    made = {}
    for key, value in schema.items():
        form = _FORMS.get(key)
        if form is not None and value is None and key != "const":
            continue
        if form is not None and not form[1](value):
            raise GrammarError(f"{key} in a JSON schema is {form[0]}, not {_shown(value)}")
        if key in ("dependentRequired", "dependencies"):
            value = {name: needed for name, needed in value.items() if needed is not None}
        made[key] = value
    return made


def checked_schema(schema: object, max_depth: int = MAX_SCHEMA_DEPTH) -> Any:
    """A JSON schema without keywords that are null, in it as well. Raises GrammarError that names a keyword whose value
    has a wrong form.
    """
    if isinstance(schema, bool):
        return schema
    if not max_depth:
        raise GrammarError("the JSON schema is nested too deep")
    words = schema_keywords(schema)
    for key, value in words.items():
        if key in _FORMS:
            words[key] = _FORMS[key][2](value, lambda part: checked_schema(part, max_depth - 1))
    return words


def _shown(value: object) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
