"""What a ToolSyntax is good for besides parsing: calls written as the model would write them, and the grammar of them.

    render(fmt, [("get_time", {"zone": "UTC"})])  -> text that the format's parser reads back to the same calls
    calls_format(fmt, tools)                      -> structural tag of all such texts

Both are built from the same three pieces per kind of body: what is written before and after the arguments (`frame`),
how arguments are written (`write`), and which texts are arguments by a JSON schema (`accept`).
"""

from __future__ import annotations

from collections.abc import Sequence

from lmkit.api import ToolDef

from lmkit_formats.calls import CallBody
from lmkit_formats.syntax import ToolSyntax
from lmkit_formats.tags import (
    Calls,
    Tag,
    const,
    sequence,
    tag_of,
)


def render(fmt: ToolSyntax, calls: Calls, tools: Sequence[ToolDef] = ()) -> str:
    """The calls as a model of this family writes them; "" for none."""
    if not calls:
        return ""
    body = primary(fmt)
    schemas = {t.name: t.parameters for t in tools}
    written = []
    for i, (name, arguments) in enumerate(calls):
        begin, end = body.frame(name, str(i))
        written.append(begin + body.write(arguments, schemas.get(name, {})) + end)
    if body.is_list:
        begin, end = body.brackets
        return _section(fmt, _wrap(fmt, begin + body.comma.join(written) + end))
    return _section(fmt, fmt.between.join(_wrap(fmt, call) for call in written)).removeprefix(fmt.begun)


def calls_format(fmt: ToolSyntax, tools: Sequence[ToolDef], parallel: bool = True) -> Tag | None:
    """One call or more and nothing else, as a format of a structural tag (see lmkit.api.Grammar); None where the format
    cannot be constrained. Raises InvalidParam for a strict tool whose schema cannot be enforced.
    """
    body = primary(fmt)
    wrap = ("", "") if body.is_list else _markers(fmt)
    separator = body.comma if body.is_list else fmt.between
    begin, end = _edges(fmt)
    if fmt.begun:  # the prompt has it for the first call
        wrap, separator = (wrap[0].removeprefix(fmt.begun), wrap[1]), separator + fmt.begun
    if not body.is_list and end.startswith(separator):
        # blanks go with the call before: a lexer could not tell those between calls from those at the end
        wrap, separator, end = (wrap[0], wrap[1] + separator), "", end.removeprefix(separator)
    calls: Tag = {
        "type": "tags_with_separator", "tags": [_call(body, tool, *wrap) for tool in tools], "separator": separator,
        "at_least_one": True, "stop_after_first": not parallel,
    }  # fmt: skip
    if body.is_list:
        inner, brackets = _markers(fmt), body.brackets
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
        if body.is_list or not body.opener:
            return None
        opener = body.opener
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


def _call(body: CallBody, tool: ToolDef, before: str, after: str) -> Tag:
    begin, end = body.frame(tool.name, "\0")
    arguments = body.accept(tool)
    if "\0" in begin:  # any index
        begin, rest = begin.split("\0")
        arguments = sequence({"type": "regex", "pattern": "[0-9]{1,4}"}, const(rest), arguments)
    return tag_of(before + begin, arguments, end + after)
