"""What a request asks of its output, as one Grammar and one Thinking. No torch.

Tool calls become a structural tag (see lmkit.api.Grammar) made of the ToolFormat; an answer that may be
constrained text instead becomes an alternative of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lmkit.api import (
    Grammar,
    JsonCalls,
    NamedJson,
    ParserFormat,
    ReasoningFormat,
    RequestError,
    Thinking,
    ToolChoice,
    ToolDef,
    ToolFormat,
)
from lmkit.text.parsing import begins_inside, thinking

Format = dict[str, Any]
_ANY_TEXT: Format = {"type": "any_text"}


class CannotConstrain(RequestError):
    """The formats of this model do not allow what the request asks for."""

    code = "unsupported"


def thinking_of(
    fmt: ReasoningFormat | ParserFormat | None, prompt_tail: str, template_kwargs: Mapping[str, object],
    budget: int | None = None,
) -> Thinking | None:  # fmt: skip
    """The thinking that may come before the answer; None where there is none. Raises CannotConstrain."""
    if fmt is None or (isinstance(fmt, ReasoningFormat) and not fmt.close):
        return None
    if not isinstance(fmt, ReasoningFormat):
        raise CannotConstrain(f"the reasoning format {fmt.name!r} does not say where the answer begins")
    inside = begins_inside(fmt, prompt_tail, template_kwargs)
    closed = any(prompt_tail.rstrip().endswith(text.rstrip()) for text in fmt.close)
    may_open = not inside and not closed and thinking(fmt, template_kwargs)
    if not inside and not may_open:
        return None
    return Thinking(fmt.close, fmt.open if may_open else (), inside, fmt.until, budget)


def constraint(
    answer: Grammar | None, tools: Sequence[ToolDef], choice: ToolChoice, fmt: ToolFormat | ParserFormat | None,
    parallel: bool = True,
) -> Grammar | None:  # fmt: skip
    """`answer`: the constraint on content. Raises CannotConstrain."""
    if not tools or choice.mode == "none" or fmt is None:
        return answer
    backend = answer.backend if answer else None
    if choice.mode in ("required", "named"):
        shown = [t for t in tools if choice.mode == "required" or t.name == choice.name]
        return _grammar(_calls(fmt, shown, choice, parallel), backend)
    if answer is not None:
        calls = _calls(fmt, tools, ToolChoice("required"), parallel)
        return _grammar({"type": "or", "elements": [calls, _as_format(answer)]}, backend)
    if any(t.strict for t in tools):
        return _grammar(_calls(fmt, tools, choice, parallel), backend)
    return None


def _grammar(fmt: Format | Grammar, backend: str | None) -> Grammar:
    if isinstance(fmt, Grammar):
        return fmt
    source = json.dumps({"type": "structural_tag", "format": fmt}, ensure_ascii=False)
    return Grammar("structural_tag", source, backend)


def _as_format(answer: Grammar) -> Format:
    match answer.kind:
        case "json_schema":
            return {"type": "json_schema", "json_schema": _loads(answer.source)}
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            return {"type": "regex", "pattern": answer.source}
        case "choice":
            return {"type": "or", "elements": [{"type": "const_string", "value": c} for c in _loads(answer.source)]}
        case "structural_tag" if isinstance(tag := _loads(answer.source), dict) and "format" in tag:
            return tag["format"]
    raise CannotConstrain(
        f"a grammar of kind {answer.kind!r} cannot stand beside tools that the model may call",
        fix="set tool_choice to 'none', or leave out the tools",
    )


def _loads(source: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as e:
        raise CannotConstrain(f"the constraint is not JSON: {e}") from None


def _calls(fmt: ToolFormat | ParserFormat, tools: Sequence[ToolDef], choice: ToolChoice, parallel: bool) -> Any:
    """One call or more; with choice "auto", free text with calls in it."""
    if not isinstance(fmt, ToolFormat):
        found = fmt.grammar(tools, choice)
        if found is None:
            raise CannotConstrain(f"calls in the tool format {fmt.name!r} cannot be constrained", fix="use 'auto'")
        return found
    body = fmt.body[0] if isinstance(fmt.body, tuple) else fmt.body
    if not isinstance(body, (JsonCalls, NamedJson)) or (choice.mode == "auto" and not fmt.open):
        raise CannotConstrain(
            f"calls in the tool format {fmt.name!r} cannot be constrained", fix="use tool_choice 'auto', without strict"
        )
    if isinstance(body, JsonCalls) and body.many == "list":
        return _listed(fmt, body, tools, choice, parallel)
    section, section_end = (texts[0] if texts else "" for texts in (fmt.section, fmt.section_close))
    tags = [_tag(fmt, body, tool) for tool in tools]
    if choice.mode == "auto":
        if section:
            raise CannotConstrain(f"strict tools in the tool format {fmt.name!r} cannot be constrained")
        return {"type": "triggered_tags", "triggers": [fmt.open[0]], "tags": tags, "stop_after_first": not parallel}
    calls: Format = {"type": "tags_with_separator", "tags": tags, "separator": _separator(fmt, body),
                     "at_least_one": True, "stop_after_first": not parallel}  # fmt: skip
    return _within(section, calls, section_end)


def _listed(fmt: ToolFormat, body: JsonCalls, tools: Sequence[ToolDef], choice: ToolChoice, parallel: bool) -> Format:
    """An array of calls."""
    begin, end = (fmt.open[0] if fmt.open else "").removesuffix("["), fmt.close[0] if fmt.close else ""
    tags = [{"type": "tag", **_json_call(body, tool)} for tool in tools]
    calls: Format = {"type": "tags_with_separator", "tags": tags, "separator": ", ", "at_least_one": True,
                     "stop_after_first": not parallel}  # fmt: skip
    if choice.mode != "auto":
        return _within(begin + "[", calls, "]" + end)
    whole = {"type": "tag", "begin": begin + "[", "content": calls, "end": "]" + end}
    return {"type": "triggered_tags", "triggers": [begin], "tags": [whole], "stop_after_first": True}


def _tag(fmt: ToolFormat, body: JsonCalls | NamedJson, tool: ToolDef) -> Format:
    """One call with its markers."""
    begin, end = fmt.open[0] if fmt.open else "", fmt.close[0] if fmt.close else ""
    if isinstance(body, JsonCalls):
        gap = "\n" if begin.endswith(">") and end.startswith("</") else ""  # as families with such tags write it
        call = _json_call(body, tool)
        return {"type": "tag", "begin": begin + gap + call["begin"], "content": call["content"],
                "end": call["end"] + gap + end}  # fmt: skip
    name = body.written.replace("{name}", tool.name)
    close = body.ends[0] if body.ends[0] != "{" else ""
    head = begin + (body.prefix[0] if body.prefix else "")
    content: Format = {"type": "json_schema", "json_schema": _parameters(tool)}
    if "{index}" in name:
        before, after = name.split("{index}", 1)
        parts = [{"type": "regex", "pattern": "[0-9]{1,3}"}, _const(after + close), content]
        return {"type": "tag", "begin": head + before, "content": _sequence(parts), "end": end}
    if body.id_mark:
        raise CannotConstrain(f"calls in the tool format {fmt.name!r} cannot be constrained", fix="use 'auto'")
    return {"type": "tag", "begin": head + name + close, "content": content, "end": end}


def _json_call(body: JsonCalls, tool: ToolDef) -> Format:
    """begin, content and end of {"name": ..., "arguments": ...}."""
    name = json.dumps(tool.name, ensure_ascii=False)
    begin = f"{{{name}: " if body.keyed else f'{{"{body.name[0]}": {name}, "{body.arguments[0]}": '
    return {"begin": begin, "content": {"type": "json_schema", "json_schema": _parameters(tool)}, "end": "}"}


def _parameters(tool: ToolDef) -> Mapping[str, object]:
    return {"type": "object", **tool.parameters} if "$ref" not in tool.parameters else tool.parameters


def _separator(fmt: ToolFormat, body: JsonCalls | NamedJson) -> str:
    return "\n" if fmt.close and not fmt.section and isinstance(body, JsonCalls) else ""


def _within(begin: str, inner: Format, end: str) -> Format:
    return _sequence([_const(begin), inner, _const(end)])


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _sequence(parts: Sequence[Format]) -> Format:
    shown = [p for p in parts if p != _const("")]
    return shown[0] if len(shown) == 1 else {"type": "sequence", "elements": shown}


TOOL_NAME = re.compile(r"[\w.:/@$-]{1,128}")  # what stands in every format without being taken for something else
