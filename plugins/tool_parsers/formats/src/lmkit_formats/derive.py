"""What a ToolSyntax is good for besides parsing: calls written as the model would write them, and the grammar of them.

    render(fmt, [("get_time", {"zone": "UTC"})])  -> text that the format's parser reads back to the same calls
    calls_format(fmt, tools)                      -> structural tag of all such texts

Both are built from the same three pieces per kind of body: what is written before and after the arguments (`_frame`),
how arguments are written (`_write`), and which texts are arguments by a JSON schema (`_accept`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmkit.api import InvalidParam, ToolDef

from lmkit_formats.calls import JsonCalls, NamedJson
from lmkit_formats.looseobject import LooseObject
from lmkit_formats.params import Params
from lmkit_formats.pycalls import PyCalls
from lmkit_formats.schemas import kinds_of
from lmkit_formats.syntax import CallBody, ToolSyntax
from lmkit_formats.tags import (
    Calls,
    Tag,
    const,
    dump,
    listed,
    maybe,
    plain,
    properties_of,
    schema_of,
    sequence,
    standing_alone,
    tag_of,
)

_MAX_DEPTH = 16  # of objects with bare keys


def render(fmt: ToolSyntax, calls: Calls, tools: Sequence[ToolDef] = ()) -> str:
    """The calls as a model of this family writes them; "" for none."""
    if not calls:
        return ""
    body = primary(fmt)
    schemas = {t.name: t.parameters for t in tools}
    written = []
    for i, (name, arguments) in enumerate(calls):
        begin, end = _frame(body, name, str(i))
        written.append(begin + _write(body, arguments, schemas.get(name, {})) + end)
    if _is_list(body):
        begin, end = _brackets(body)
        return _section(fmt, _wrap(fmt, begin + _comma(body).join(written) + end))
    return _section(fmt, fmt.between.join(_wrap(fmt, call) for call in written)).removeprefix(fmt.begun)


def calls_format(fmt: ToolSyntax, tools: Sequence[ToolDef], parallel: bool = True) -> Tag | None:
    """One call or more and nothing else, as a format of a structural tag (see lmkit.api.Grammar); None where the format
    cannot be constrained. Raises InvalidParam for a strict tool whose schema cannot be enforced.
    """
    body = primary(fmt)
    wrap = ("", "") if _is_list(body) else _markers(fmt)
    separator = _comma(body) if _is_list(body) else fmt.between
    begin, end = _edges(fmt)
    if fmt.begun:  # the prompt has it for the first call
        wrap, separator = (wrap[0].removeprefix(fmt.begun), wrap[1]), separator + fmt.begun
    if not _is_list(body) and end.startswith(separator):
        # blanks go with the call before: a lexer could not tell those between calls from those at the end
        wrap, separator, end = (wrap[0], wrap[1] + separator), "", end.removeprefix(separator)
    calls: Tag = {
        "type": "tags_with_separator", "tags": [_call(body, tool, *wrap) for tool in tools], "separator": separator,
        "at_least_one": True, "stop_after_first": not parallel,
    }  # fmt: skip
    if _is_list(body):
        inner, brackets = _markers(fmt), _brackets(body)
        begin, end = begin + inner[0] + brackets[0], brackets[1] + inner[1] + end
    return tag_of(begin, calls, end) if begin or end else calls


def free_format(fmt: ToolSyntax, tools: Sequence[ToolDef], parallel: bool = True) -> Tag | None:
    """Text with calls in it, likewise; None also where nothing tells a call from text."""
    calls = calls_format(fmt, tools, parallel)
    if calls is None:
        return None
    tags = [calls] if calls["type"] == "tag" else calls["tags"]
    opener = (fmt.section or fmt.open or ("",))[0].rstrip("[{")
    if not opener:  # the family writes no marker: what its calls have in common
        body = primary(fmt)
        if not isinstance(body, JsonCalls) or _is_list(body):
            return None
        opener = _frame(body, "", "0")[0].split('""')[0] + '"'
    return {"type": "triggered_tags", "triggers": [opener], "tags": tags, "stop_after_first": not parallel}


def primary(fmt: ToolSyntax) -> CallBody:
    """The body that the family writes; others are accepted."""
    return fmt.body[0] if isinstance(fmt.body, tuple) else fmt.body


# -- around calls


def _markers(fmt: ToolSyntax) -> tuple[str, str]:
    begin = (fmt.open or ("",))[0]
    end = (fmt.close or ("",))[0] if begin else ""
    if begin.endswith(("[", "{")):
        begin = begin[:-1]
    return begin + (fmt.inner if begin else ""), (fmt.inner if end else "") + end


def _wrap(fmt: ToolSyntax, call: str) -> str:
    begin, end = _markers(fmt)
    return begin + call + end


def _edges(fmt: ToolSyntax) -> tuple[str, str]:
    gap = fmt.between if fmt.between.isspace() else ""
    begin = fmt.section[0] + gap if fmt.section else ""
    return begin, gap + fmt.section_close[0] if fmt.section_close else ""


def _section(fmt: ToolSyntax, calls: str) -> str:
    begin, end = _edges(fmt)
    return begin + calls + end


def _is_list(body: CallBody) -> bool:
    return isinstance(body, PyCalls) or (isinstance(body, JsonCalls) and body.many != "one")


def _brackets(body: CallBody) -> tuple[str, str]:
    return ("", "") if isinstance(body, PyCalls) and body.lines else ("[", "]")


def _comma(body: CallBody) -> str:
    return "\n" if isinstance(body, PyCalls) and body.lines else ", "


def _call(body: CallBody, tool: ToolDef, before: str, after: str) -> Tag:
    begin, end = _frame(body, tool.name, "\0")
    arguments = _accept(body, tool)
    if "\0" in begin:  # any index
        begin, rest = begin.split("\0")
        arguments = sequence({"type": "regex", "pattern": "[0-9]{1,4}"}, const(rest), arguments)
    return tag_of(before + begin, arguments, end + after)


# -- one call


def _frame(body: CallBody, name: str, index: str) -> tuple[str, str]:
    """What is written before and after the arguments."""
    if isinstance(body, JsonCalls):
        if body.keyed:
            return f"{{{dump(name)}: ", "}"
        id = f'"{body.id[0]}": "{index}", ' if body.id else ""
        return f'{{{id}"{body.name[0]}": {dump(name)}, "{body.arguments[0]}": ', "}"
    if isinstance(body, PyCalls):
        return f"{name}(", ")"
    prefix = "".join(body.prefix)
    if isinstance(body, LooseObject):
        return f"{prefix}{name}{{", "}"
    if isinstance(body, NamedJson):
        end = "" if body.ends[0] == "{" else body.ends[0]
        return prefix + body.written.replace("{name}", name).replace("{index}", index) + end, ""
    end = body.name_ends[0] if body.name_ends[0] not in (body.open, body.foot) else ""
    return prefix + name + end + body.gap, body.foot


def _write(body: CallBody, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    if isinstance(body, PyCalls):
        return ", ".join(f"{key}={_python(value)}" for key, value in arguments.items())
    if isinstance(body, LooseObject):
        return _loose(body, arguments)[1:-1]
    if not isinstance(body, Params):
        return dump(arguments)
    elements = []
    for key, value in arguments.items():
        as_text = isinstance(value, str)
        begin, end = _element(body, key, as_text)
        elements.append(begin + (value if as_text else dump(value)) + end + body.gap)
    return "".join(elements)


def _element(body: Params, key: str, as_text: bool) -> tuple[str, str]:
    kind = "string" if as_text else "json"
    key_end = body.key_ends[body.typed.index(kind) if kind in body.typed else 0]
    blank = "\n" if body.strip == "newline" else ""
    return f"{body.open}{key}{key_end}{body.value_open}{blank}", blank + body.close


def _accept(body: CallBody, tool: ToolDef) -> Tag:
    """The arguments that the tool's schema allows, as this body writes them."""
    schema = schema_of(tool)
    if isinstance(body, (JsonCalls, NamedJson)):
        return {"type": "json_schema", "json_schema": schema}
    if isinstance(body, LooseObject):
        return _loose_members(body, schema, schema, tool.strict)
    properties, required, optional = properties_of(schema)
    if isinstance(body, PyCalls):
        return listed(required, optional, ", ", lambda k: (f"{k}=", _python_value(properties[k], schema)))
    elements = [_parameter(body, key, properties[key], schema, tool.strict) for key in required]
    elements += [maybe(_parameter(body, key, properties[key], schema, tool.strict)) for key in optional]
    return sequence(*elements)


def _parameter(body: Params, key: str, schema: object, root: Mapping[str, Any], strict: bool) -> Tag:
    kinds = kinds_of(schema, root)
    only_text = body.verbatim or kinds == {"string"} or (kinds is None and body.untyped == "string")
    options = []
    if only_text or (kinds and "string" in kinds):
        begin, end = _element(body, key, as_text=True)
        options += [tag_of(begin, content, end + body.gap) for content in plain(schema, strict)]
    if not only_text:
        begin, end = _element(body, key, as_text=False)
        rest = {"type": sorted(kinds - {"string"})} if kinds else {}
        content = {"type": "json_schema", "json_schema": {**standing_alone(schema, root), **rest}}
        options.append(tag_of(begin, content, end + body.gap))
    return options[0] if len(options) == 1 else {"type": "or", "elements": options}


def _loose_members(
    body: LooseObject, schema: Mapping[str, Any], root: Mapping[str, Any], strict: bool, depth: int = 0
) -> Tag:
    """Raises InvalidParam for an object that does not say what is in it."""
    properties, required, optional = properties_of(schema)
    if (not properties and depth) or depth > _MAX_DEPTH:
        raise InvalidParam("tools", dict(schema), "objects with properties, not nested too deep, for this tool format")
    return listed(
        required, optional, ",", lambda k: (f"{k}:", _loose_value(body, properties[k], root, strict, depth + 1))
    )


def _loose_value(body: LooseObject, schema: object, root: Mapping[str, Any], strict: bool, depth: int) -> Tag:
    kinds = kinds_of(schema, root)
    known = schema if isinstance(schema, Mapping) else {}
    quote = body.quotes[0]
    options: list[Tag] = []
    if kinds is None or "string" in kinds:
        options += [tag_of(quote, content, quote) for content in plain(schema, strict)]
    if kinds and "array" in kinds:
        item = tag_of("", _loose_value(body, known.get("items"), root, strict, depth + 1), "")
        options.append(tag_of("[", {"type": "tags_with_separator", "tags": [item], "separator": ","}, "]"))
    if kinds and "object" in kinds:
        options.append(tag_of("{", _loose_members(body, known, root, strict, depth), "}"))
    scalars = {"integer", "number", "boolean", "null"} & (kinds or {"number", "boolean", "null"})
    if scalars:
        rest = {**standing_alone(schema, root), "type": sorted(scalars)}
        options.append({"type": "json_schema", "json_schema": rest})
    return options[0] if len(options) == 1 else {"type": "or", "elements": options}


def _loose(body: LooseObject, value: object) -> str:
    """A JSON value with bare keys and marked strings."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{_loose(body, v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_loose(body, v) for v in value) + "]"
    return f"{body.quotes[0]}{value}{body.quotes[0]}" if isinstance(value, str) else dump(value)


def _python_value(schema: object, root: Mapping[str, Any]) -> Tag:
    kinds = kinds_of(schema, root)
    words = {"boolean": r"True|False", "null": "None"}
    if kinds and kinds <= words.keys():
        return {"type": "regex", "pattern": "|".join(words[k] for k in sorted(kinds))}
    rest = {"type": sorted(kinds)} if kinds else {}
    return {"type": "json_schema", "json_schema": {**standing_alone(schema, root), **rest}}


def _python(value: object) -> str:
    """A JSON value as a Python literal."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{dump(k)}: {_python(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_python, value)) + "]"
    return dump(value) if isinstance(value, str) else repr(value)
