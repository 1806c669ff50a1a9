"""What a request asks of its output, as one Grammar and one Thinking. No torch.

Tool calls become a structural tag (see lmkit.api.Grammar) made by the tool format; an answer that may be
constrained text instead becomes an alternative of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lmkit.api import (
    DeclaredFormat,
    Grammar,
    GrammarError,
    InvalidParam,
    RequestError,
    Thinking,
    ToolChoice,
    ToolDef,
    checked_schema,
)
from lmkit.text.formats import AnyFormat

Format = dict[str, Any]
_ANY_TEXT: Format = {"type": "any_text"}


class CannotConstrain(RequestError):
    """The formats of this model do not allow what the request asks for."""

    code = "unsupported"


def thinking_of(
    fmt: AnyFormat | None, prompt_tail: str, template_kwargs: Mapping[str, object], budget: int | None = None
) -> Thinking | None:
    """The thinking that may come before the answer; None where there is none. Raises CannotConstrain."""
    if fmt is None:
        return None
    if not isinstance(fmt, DeclaredFormat):
        raise CannotConstrain(
            f"the reasoning format {fmt.name!r} does not say where the answer begins",
            fix="leave out the constraint, or start with another --reasoning-parser (none is possible too)",
        )
    return fmt.thinking(prompt_tail, template_kwargs, budget)


def answer_of(fmt: AnyFormat | None, answer: Grammar | None) -> Grammar | None:
    """The constraint on content with what stands around content. Raises CannotConstrain."""
    header = fmt.answer_header if isinstance(fmt, DeclaredFormat) else ""
    if answer is None or not header:
        return answer
    return _grammar({"type": "tag", "begin": header, "content": _as_format(answer), "end": ""}, answer.backend)


def constraint(
    answer: Grammar | None, tools: Sequence[ToolDef], choice: ToolChoice, fmt: AnyFormat | None, parallel: bool = True
) -> Grammar | None:
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


def _calls(fmt: AnyFormat, tools: Sequence[ToolDef], choice: ToolChoice, parallel: bool) -> Format | Grammar:
    """One call or more; with choice "auto", free text with calls in it."""
    found: Format | Grammar | None
    tools = [_checked(tool) for tool in tools]
    if isinstance(fmt, DeclaredFormat):
        found = fmt.tag(tools, free=choice.mode == "auto", parallel=parallel)
    else:
        found = fmt.grammar(tools, choice)
    if found is None:
        raise CannotConstrain(
            f"calls in the tool format {fmt.name!r} cannot be constrained", fix="use tool_choice 'auto', without strict"
        )
    return found


def _checked(tool: ToolDef) -> ToolDef:
    """The tool with a well-formed schema. Raises InvalidParam that names what is not."""
    try:
        return replace(tool, parameters=checked_schema(tool.parameters))
    except GrammarError as e:
        raise InvalidParam(
            f"tools: parameters of {tool.name}", tool.parameters, f"a JSON schema: {e.message}"
        ) from None


TOOL_NAME = re.compile(r"[\w.:/@$-]{1,128}")  # what stands in every format without being taken for something else
