"""Messages and tools of a request as an ask wants them. Clients echo answers and decorate what they send.

A name that this module does not know goes on when the chat template reads it. It is dropped otherwise, and the answer
says so. What a client says in words is never dropped: parts that are not text are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from lmkit.api import ToolChoice
from lmkit_python.front.ask import UnsupportedField

from lmkit_http.strict import Echoed, InvalidBody, Message, Part, Tool, check_arguments

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
ANY_TOOL = ToolChoice()
_TEXT = ("text", "input_text", "output_text")
_MEDIA = {"image": "images", "input_image": "images", "audio": "audio", "input_audio": "audio", "video": "videos",
          "file": "files", "input_file": "files"}  # fmt: skip


def conversation(messages: Sequence[Message], read: Collection[str], dropped: set[str]) -> list[dict[str, Any]]:
    """`read`: the names and texts in the chat template. `dropped` gets the names of what is left out.

    Raises RequestError.
    """
    return [_message(message, i, read, dropped) for i, message in enumerate(messages)]


def declared(
    tools: Sequence[Tool], read: Collection[str], dropped: set[str], choice: ToolChoice = ANY_TOOL
) -> list[dict[str, Any]]:
    """The functions among the tools, without what the template does not name.

    A tool of another type is one that some other service runs. The model is not offered it, and `dropped` gets
    "tools.TYPE". Raises UnsupportedField for such a tool when `choice` demands a call of any tool.
    """
    functions = []
    for i, tool in enumerate(tools):
        if tool.type != "function":
            if choice.mode == "required":
                raise UnsupportedField(
                    f"tools.{i}.type", f"tools of type {tool.type[:64]!r} are not run here, and a call is required",
                    fix="send functions, or leave tool_choice out",
                )  # fmt: skip
            dropped.add(f"tools.{tool.type}")
        elif tool.function is None:
            raise InvalidBody(f"tools.{i}.function is required", f"tools.{i}.function")
        else:
            functions.append(_known(tool, "tools", read, dropped))
    return functions


def _message(message: Message, number: int, read: Collection[str], dropped: set[str]) -> dict[str, Any]:
    field, role = f"messages.{number}", message.role
    if role not in ROLES and role != "function" and role not in read:
        known = ", ".join(map(repr, sorted(ROLES)))
        raise UnsupportedField(f"{field}.role", f"the chat template knows no role {role[:64]!r}", fix=f"use {known}")
    if message.tool_calls and role != "assistant":
        raise UnsupportedField(f"{field}.tool_calls", "only assistant messages have tool_calls")
    content, thought = _content(message, field, dropped)
    if message.content is None and role in ("user", "system", "developer"):
        raise InvalidBody(f"{field}.content is required", f"{field}.content")
    shown = _known(message, "messages", read, dropped)
    if content is not None or role != "assistant":
        shown["content"] = content or ""
    if thought and not (shown.get("reasoning") or shown.get("reasoning_content")):
        shown["reasoning_content"] = thought
    if role == "function" and ("tool" in read or role not in read):  # what tools were called at first
        shown["role"] = "tool"
    if role == "assistant" and not message.tool_calls and (function := _legacy_call(message, field)) is not None:
        shown["tool_calls"] = [{"type": "function", "function": function}]
        dropped.discard("messages.function_call")
    return shown


def _legacy_call(message: Message, field: str) -> dict[str, str] | None:
    """The call of a message that was written before there were several. Raises RequestError."""
    call = (message.model_extra or {}).get("function_call")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments")
    text = arguments if isinstance(arguments, str) else "{}"
    check_arguments(text, f"{field}.function_call.arguments")
    return {"name": call["name"], "arguments": text}


def _content(message: Message, field: str, dropped: set[str]) -> tuple[Any, str]:
    """The content, and what parts of it say of reasoning. Raises RequestError."""
    if not isinstance(message.content, list):
        return message.content, ""
    parts, thoughts = [], []
    for i, part in enumerate(message.content):
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
            continue
        if part.type == "thinking":
            thoughts.append(part.thinking or part.text or "")
        else:
            parts.append({"type": "text", "text": part_text(part, f"{field}.content.{i}")})
        dropped |= {f"messages.content.{name}" for name, value in (part.model_extra or {}).items()
                    if value not in (None, [], {})}  # fmt: skip
    return parts or None, "\n".join(thoughts)


def part_text(part: Part, field: str) -> str:
    """Raises RequestError for a part that is no text."""
    kind = part.type.removesuffix("_url").removesuffix("_embeds")
    if part.type not in (*_TEXT, "refusal"):
        what = _MEDIA.get(kind, f"parts of type {part.type!r}")
        raise UnsupportedField(f"{field}.type", f"this model takes no {what}", fix="send parts of type 'text'")
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        name = "refusal" if part.type == "refusal" else "text"
        raise InvalidBody(f"{field}.{name} is required", f"{field}.{name}")
    return text


def _known(value: Any, where: str, read: Collection[str], dropped: set[str]) -> Any:
    """The value without nulls and without names that neither this module nor the template knows."""
    if isinstance(value, list):
        return [_known(member, where, read, dropped) for member in value]
    if not isinstance(value, Echoed):
        return value
    fields = [name for name in type(value).model_fields if name != "content"]  # which is read by _content
    known = {name: getattr(value, name) for name in fields}
    for name, member in (value.model_extra or {}).items():
        if name in read:
            known[name] = member
        elif member not in (None, [], {}):
            dropped.add(f"{where}.{name}")
    return {name: _known(member, f"{where}.{name}", read, dropped) for name, member in known.items()
            if member is not None}  # fmt: skip
