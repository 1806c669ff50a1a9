"""What bodies and formats are written with, and their structural tags are made of (see lmkit.api.Grammar)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmkit.api import InvalidParam, ToolDef

from lmkit_formats.closing import closed
from lmkit_formats.schemas import items_of

Tag = dict[str, Any]  # one format of a structural tag
Calls = Sequence[tuple[str, Mapping[str, Any]]]
_MAX_OPTIONAL = 16  # arguments that may be left out; the grammar wants more of them given


def schema_of(tool: ToolDef) -> Mapping[str, Any]:
    """What the arguments are: they have no other names than those that are listed."""
    schema: Mapping[str, Any] = closed(tool.parameters)
    return schema if "$ref" in schema else {"type": "object", **schema}


def properties_of(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str], list[str]]:
    """(all, names of the required ones, names of the others)"""
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = [k for k in items_of(schema.get("required")) if k in properties]
    return properties, required, [k for k in properties if k not in required]


def plain(schema: object, strict: bool) -> list[Tag]:
    """Strings that are written without quotes. Raises InvalidParam for what cannot be enforced on them."""
    if not isinstance(schema, Mapping):
        return [{"type": "any_text"}]
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices is not None:
        return [const(c) for c in choices if isinstance(c, str)]
    if strict and ("pattern" in schema or "format" in schema):
        raise InvalidParam("tools", dict(schema), "string parameters without pattern and format, for this tool format")
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if not low and high is None:
        return [{"type": "any_text"}]
    return [{"type": "regex", "pattern": f"[^<]{{{low},{'' if high is None else high}}}"}]


def listed(
    required: Sequence[str], optional: Sequence[str], comma: str, member: Callable[[str], tuple[str, Tag]]
) -> Tag:
    """Members with a comma between them. `member`: what is written before a value, and the value."""

    def written(key: str, comma: str) -> Tag:
        begin, value = member(key)
        return sequence(const(comma + begin), value)

    given = [written(key, comma if i else "") for i, key in enumerate(required)]
    rest = [maybe(written(key, comma)) for key in optional]
    if given or not optional:
        return sequence(*given, *rest)
    starts = [sequence(written(key, ""), *rest[i + 1 :]) for i, key in enumerate(optional[:_MAX_OPTIONAL])]
    return maybe({"type": "or", "elements": starts})


def standing_alone(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of a schema with the definitions that it may refer to."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**shared, **schema} if isinstance(schema, Mapping) else shared


def tag_of(begin: str, content: Tag, end: str) -> Tag:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def const(text: str) -> Tag:
    return {"type": "const_string", "value": text}


def maybe(tag: Tag) -> Tag:
    return {"type": "or", "elements": [tag, const("")]}


def sequence(*tags: Tag) -> Tag:
    return {"type": "sequence", "elements": list(tags) or [const("")]}


def dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
