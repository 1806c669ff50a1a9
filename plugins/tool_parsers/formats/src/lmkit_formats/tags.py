"""What bodies and formats are written with, and their structural tags are made of (see lmkit.api.Grammar)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmkit.api import InvalidParam, ToolDef

from lmkit_formats.closing import closed
from lmkit_formats.schemas import alternatives, followed, items_of, kinds_of, value_type

Tag = dict[str, Any]  # one format of a structural tag
Calls = Sequence[tuple[str, Mapping[str, Any]]]
_MAX_OPTIONAL = 16  # arguments that may be left out; the grammar wants more of them given


def schema_of(tool: ToolDef) -> Mapping[str, Any]:
    """What the arguments are: they have no other names than those that are listed."""
    schema: Mapping[str, Any] = closed(tool.parameters)
    return schema if "$ref" in schema else {"type": "object", **schema}


def ways(
    schema: Mapping[str, Any], root: Mapping[str, Any], strict: bool
) -> list[tuple[Mapping[str, Any], list[str], list[str]]]:
    """(all properties, names of the required ones, names of the others) of an object, for each way to choose between
    the options of its schema. Raises InvalidParam for a strict tool whose options cannot be told apart.
    """
    unsaid = sorted(_UNSAID & schema.keys())
    if strict and unsaid:
        raise InvalidParam("tools", unsaid[0], "arguments of a strict tool without it, for this tool format")
    return [
        (way.properties, list(way.required), [name for name in way.properties if name not in way.required])
        for way in alternatives(schema, root)
    ]


# what a sequence of elements cannot keep
_UNSAID = frozenset({
    "dependentRequired", "dependentSchemas", "if", "maxProperties", "minProperties", "not", "oneOf", "propertyNames",
})  # fmt: skip


def either(tags: Sequence[Tag]) -> Tag:
    different: list[Tag] = []
    for tag in tags:
        if tag not in different:
            different.append(tag)
    return different[0] if len(different) == 1 else {"type": "or", "elements": different}


def plain(schema: object, root: Mapping[str, Any], strict: bool) -> list[Tag]:
    """Strings that are written without quotes. Raises InvalidParam for what cannot be enforced on them."""
    said = followed(schema, root)
    if "const" not in said and "enum" not in said:
        for key in ("anyOf", "oneOf"):
            if options := items_of(said.get(key)):
                kinds = [kinds_of(option, root) for option in options]
                texts = [option for option, of in zip(options, kinds, strict=True) if of is None or "string" in of]
                rest = {word: part for word, part in said.items() if word != key}
                return [tag for text in texts for tag in plain({**rest, **followed(text, root)}, root, strict)]
    values = value_type(said, root).values
    if values is not None:
        return [const(value) for value in values if isinstance(value, str)]
    if strict and not said.keys().isdisjoint(("allOf", "format", "if", "not", "pattern")):
        expected = "string parameters without pattern and format, allOf, if and not, for this tool format"
        raise InvalidParam("tools", dict(said), expected)
    low, high = said.get("minLength", 0), said.get("maxLength")
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
