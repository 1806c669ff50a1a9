"""What a chat template makes of each kind of message, found out by rendering some when it is loaded.

A finding is "yes", or "no" with the reason. Findings are shown at start-up and at /v1/models/NAME, so that a template
that drops system messages is known before a user wonders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmkit.api import ChatRenderer, LmkitError, TemplateFailed

_SEEN = "lmkitprobe"
_USER = {"role": "user", "content": "Hello"}
_ASSISTANT = {"role": "assistant", "content": "Good day"}
_ID = "123456789"  # of nine characters, as some templates demand


def _call(*names: str) -> dict[str, Any]:
    calls = [{"id": _ID, "type": "function", "function": {"name": name, "arguments": '{"a": "b"}'}} for name in names]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": "A tool", "parameters": parameters}}


# name -> messages, tools, texts that must be seen
_BATTERY: Mapping[str, tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], tuple[str, ...]]] = {
    "user": ([{"role": "user", "content": _SEEN}], (), (_SEEN,)),
    "system": ([{"role": "system", "content": _SEEN}, _USER], (), (_SEEN,)),
    "late system": ([_USER, _ASSISTANT, {"role": "system", "content": _SEEN}, _USER], (), (_SEEN,)),
    "several turns": ([_USER, {"role": "assistant", "content": _SEEN}, _USER], (), (_SEEN,)),
    "consecutive users": ([_USER, {"role": "user", "content": _SEEN}], (), ("Hello", _SEEN)),
    "list content": ([{"role": "user", "content": [{"type": "text", "text": _SEEN}]}], (), (_SEEN,)),
    "tools": ([_USER], (_tool(_SEEN),), (_SEEN,)),
    "tool calls": ([_USER, _call(_SEEN), {"role": "tool", "tool_call_id": _ID, "content": "1"}], (_tool("f"),),
                   (_SEEN,)),
    "parallel tool calls": (
        [_USER, _call(f"{_SEEN}1", f"{_SEEN}2"), {"role": "tool", "tool_call_id": _ID, "content": "1"}],
        (_tool(f"{_SEEN}0"),), (f"{_SEEN}1", f"{_SEEN}2"),
    ),
    "tool results": ([_USER, _call("f"), {"role": "tool", "tool_call_id": _ID, "content": _SEEN}], (), (_SEEN,)),
}  # fmt: skip
_SWITCHES = ("enable_thinking", "thinking")
_WORTH_A_WARNING = ("user", "system", "several turns", "consecutive users", "list content")


def probe(renderer: ChatRenderer) -> dict[str, str]:
    """name -> "yes" or "no: reason"."""
    found = {name: _try(renderer, *case) for name, case in _BATTERY.items()}
    if not renderer.takes_tools:
        found["tools"] = "no: it does not read them"
    found["prefill"] = _prefill(renderer)
    found["thinking switch"] = _switch(renderer)
    return found


def warnings(findings: Mapping[str, str]) -> list[str]:
    """The findings that a user should know of at start-up."""
    return [
        f"the chat template and {name.replace('several', 'conversations of several')}: {findings[name]}"
        for name in _WORTH_A_WARNING
        if findings[name] != "yes"
    ]


def _try(renderer: ChatRenderer, messages: Sequence, tools: Sequence, texts: tuple[str, ...]) -> str:
    try:
        text = renderer.render(messages, tools)
    except LmkitError as e:
        return _refusal(e)
    missing = [t for t in texts if t not in text]
    return "no: it is dropped" if missing else "yes"


def _refusal(error: LmkitError) -> str:
    """The finding that names the error; messages of the battery have no numbers that a user knows."""
    return f"no: {error.cause if isinstance(error, TemplateFailed) else error.message}"


def _prefill(renderer: ChatRenderer) -> str:
    """Whether a message of the assistant can be begun."""
    try:
        text = renderer.render([_USER, {"role": "assistant", "content": _SEEN}], continue_final_message=True)
    except LmkitError as e:
        return _refusal(e)
    return "yes" if text.endswith(_SEEN) else "no: the message does not end the prompt"


def _switch(renderer: ChatRenderer) -> str:
    """The variable that turns thinking on or off, if it changes the prompt."""
    for name in _SWITCHES:
        if name not in renderer.options:
            continue
        try:
            on, off = (renderer.render([_USER], kwargs={name: value}) for value in (True, False))
        except LmkitError as e:
            return _refusal(e)
        return name if on != off else f"no: {name} changes nothing"
    return "no: there is none"
