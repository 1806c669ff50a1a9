"""The types that a JSON schema allows, in whatever language it spells them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_MAX_SCHEMA_DEPTH = 8  # of $ref and anyOf that are looked into for a type
_KINDS: dict[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "object": (dict,), "array": (list,),
}  # fmt: skip
# types as other languages spell them, with or without a size: int64, unsigned long, float32, dict[str, int]
_SPELLED = re.compile(
    r"(?:(?P<integer>u?int|integer|u?long|u?short|unsigned)|(?P<number>num|number|numeric|float|double|decimal)"
    r"|(?P<boolean>bool|boolean)|(?P<object>dict|dictionary|map|mapping|obj|object|struct)"
    r"|(?P<array>list|arr|array|tuple|set|sequence|vector)|(?P<string>str|string|text|char|varchar)"
    r"|(?P<null>none|nonetype|null|nil))(?![a-z_])"
)


def kinds_of(schema: object, root: Mapping[str, Any], depth: int = 0) -> frozenset[str] | None:
    """The JSON types that a schema allows, as far as it says so; None = it does not."""
    if not isinstance(schema, Mapping) or depth > _MAX_SCHEMA_DEPTH:
        return None
    kind = schema.get("type")
    if isinstance(kind, str):
        return _spelled(kind)
    if isinstance(kind, Sequence):
        return frozenset().union(*(_spelled(k) or () for k in kind if isinstance(k, str)))
    if isinstance(ref := schema.get("$ref"), str) and ref.startswith("#/"):
        return kinds_of(_resolve(ref, root), root, depth + 1)
    found: set[str] = set()
    for option in [o for key in ("anyOf", "oneOf", "allOf") for o in items_of(schema.get(key))]:
        found |= kinds_of(option, root, depth + 1) or frozenset()
    values = [*items_of(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    found |= {kind_of(v) for v in values}
    if not found and "properties" in schema:
        return frozenset(("object",))
    if not found and "items" in schema:
        return frozenset(("array",))
    return frozenset(found) or None


def _spelled(kind: str) -> frozenset[str] | None:
    """The JSON type that a schema means; None where the name says nothing."""
    if kind in _KINDS or kind == "string":
        return frozenset((kind,))
    match = _SPELLED.match(kind.lower())
    return frozenset((str(match.lastgroup),)) if match else None


def items_of(value: object) -> Sequence[Any]:
    """The first items of what a schema should have a list for."""
    return value[:64] if isinstance(value, (list, tuple)) else ()


def _resolve(ref: str, root: Mapping[str, Any]) -> object:
    node: Any = root
    for part in ref[2:].split("/"):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def kind_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    return next((k for k, types in _KINDS.items() if isinstance(value, types)), "string")
