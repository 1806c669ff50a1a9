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
    ChannelFormat,
    Grammar,
    ParserFormat,
    ReasoningFormat,
    RequestError,
    Thinking,
    ToolChoice,
    ToolDef,
    ToolFormat,
)
from lmkit.text.derive import calls_format, channel_calls_format, free_format
from lmkit.text.reasoning import begins_inside, thinking

Format = dict[str, Any]
_ANY_TEXT: Format = {"type": "any_text"}


class CannotConstrain(RequestError):
    """The formats of this model do not allow what the request asks for."""

    code = "unsupported"


def thinking_of(
    fmt: ReasoningFormat | ChannelFormat | ParserFormat | None, prompt_tail: str, template_kwargs: Mapping[str, object],
    budget: int | None = None,
) -> Thinking | None:  # fmt: skip
    """The thinking that may come before the answer; None where there is none. Raises CannotConstrain."""
    if fmt is None or (isinstance(fmt, ReasoningFormat) and not fmt.close):
        return None
    if isinstance(fmt, ChannelFormat):
        opens = tuple(f"{fmt.channel}{name}{fmt.message}" for name in fmt.reasoning)
        return Thinking((f"{fmt.ends[0]}{fmt.start}{fmt.role}",), opens, budget=budget)
    if not isinstance(fmt, ReasoningFormat):
        raise CannotConstrain(
            f"the reasoning format {fmt.name!r} does not say where the answer begins",
            fix="leave out the constraint, or start with another --reasoning-parser (none is possible too)",
        )
    inside = begins_inside(fmt, prompt_tail, template_kwargs)
    closed = any(prompt_tail.rstrip().endswith(text.rstrip()) for text in fmt.close)
    may_open = not inside and not closed and thinking(fmt, template_kwargs)
    if not inside and not may_open:
        return None
    return Thinking(fmt.close, fmt.open if may_open else (), inside, (*fmt.until, *fmt.answer), budget)


def answer_of(fmt: ReasoningFormat | ChannelFormat | ParserFormat | None, answer: Grammar | None) -> Grammar | None:
    """The constraint on content with what stands around content. Raises CannotConstrain."""
    if answer is None or not isinstance(fmt, ChannelFormat):
        return answer
    header = f"{fmt.channel}{fmt.final}{fmt.message}"
    return _grammar({"type": "tag", "begin": header, "content": _as_format(answer), "end": ""}, answer.backend)


def constraint(
    answer: Grammar | None, tools: Sequence[ToolDef], choice: ToolChoice,
    fmt: ToolFormat | ChannelFormat | ParserFormat | None,
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


def _calls(
    fmt: ToolFormat | ChannelFormat | ParserFormat, tools: Sequence[ToolDef], choice: ToolChoice, parallel: bool
) -> Any:
    """One call or more; with choice "auto", free text with calls in it."""
    if isinstance(fmt, ToolFormat):
        found: Any = free_format(fmt, tools, parallel) if choice.mode == "auto" else calls_format(fmt, tools, parallel)
    elif isinstance(fmt, ChannelFormat):
        found = None if choice.mode == "auto" else channel_calls_format(fmt, tools)
    else:
        found = fmt.grammar(tools, choice)
    if found is None:
        raise CannotConstrain(
            f"calls in the tool format {fmt.name!r} cannot be constrained", fix="use tool_choice 'auto', without strict"
        )
    return found


TOOL_NAME = re.compile(r"[\w.:/@$-]{1,128}")  # what stands in every format without being taken for something else
