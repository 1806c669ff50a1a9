"""Writes Harmony: conversations as the model reads them. Source: docs/format.md of openai/harmony.

render([Message("system", system_text()), Message("user", "Hi")], complete=True)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmkit.api import ToolDef

from lmkit_tool_parser_openai.formats import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, START

IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
CHANNELS = ("analysis", "commentary", "final")
JSON = f"{CONSTRAIN}json"


@dataclass(frozen=True, slots=True)
class Message:
    """`role`: system, developer, user, assistant, or the name of the tool that answers."""

    role: str
    content: str
    channel: str = ""
    recipient: str = ""
    content_type: str = ""

    def __str__(self) -> str:
        to = f" to={self.recipient}" if self.recipient else ""
        channel = f"{CHANNEL}{self.channel}" if self.channel else ""
        content_type = f" {self.content_type}" if self.content_type else ""
        end = CALL if self.role == "assistant" and self.recipient else END
        return f"{START}{self.role}{to}{channel}{content_type}{MESSAGE}{self.content}{end}"


def call(name: str, arguments: str) -> Message:
    """A call of a function. `arguments`: JSON."""
    return Message("assistant", arguments, "commentary", f"functions.{name}", JSON)


def render(messages: Sequence[Message], *, complete: bool = False, keep_analysis: bool = False) -> str:
    """The conversation; with `complete` the beginning of the assistant's next message follows.

    The analysis of a turn that led to a final answer is left out once the user has spoken again.
    """
    users = [i for i, m in enumerate(messages) if m.role == "user"]
    finals = [i for i, m in enumerate(messages) if m.channel == "final"]

    def is_over(at: int) -> bool:
        final = next((i for i in finals if i > at), None)
        return final is not None and any(i > final for i in users)

    shown = [m for i, m in enumerate(messages) if keep_analysis or m.channel != "analysis" or not is_over(i)]
    return "".join(map(str, shown)) + (f"{START}assistant" if complete else "")


def system_text(
    identity: str = IDENTITY,
    *,
    knowledge_cutoff: str = "2024-06",
    date: str = "",
    effort: str = "medium",
    tools: Sequence[str] = (),
    channels: Sequence[str] = CHANNELS,
    has_functions: bool = False,
) -> str:
    """Content of the system message. `tools`: sections of built-in tools; `date`: YYYY-MM-DD."""
    today = f"\nCurrent date: {date}" if date else ""
    sections = [f"{identity}\nKnowledge cutoff: {knowledge_cutoff}{today}", f"Reasoning: {effort}"]
    if tools:
        sections += ["# Tools", *tools]
    valid = f"# Valid channels: {', '.join(channels)}. Channel must be included for every message."
    if has_functions:
        valid += "\nCalls to these tools must go to the commentary channel: 'functions'."
    return "\n\n".join([*sections, valid])


def developer_text(instructions: str = "", tools: Sequence[ToolDef] = ()) -> str:
    """Content of the developer message: what others call the system prompt, and the functions."""
    sections = [f"# Instructions\n\n{instructions}"] if instructions else []
    if tools:
        sections.append(f"# Tools\n\n{namespace('functions', tools)}")
    return "\n\n".join(sections)


def namespace(name: str, tools: Sequence[ToolDef], description: str = "") -> str:
    """A section of tools, as TypeScript types."""
    types = "".join(f"{_comment(t.description)}type {t.name} = {_signature(t.parameters)} => any;\n\n" for t in tools)
    return f"## {name}\n\n{_comment(description)}namespace {name} {{\n\n{types}}} // namespace {name}"


def _signature(parameters: Mapping[str, Any]) -> str:
    return f"(_: {typescript(parameters)})" if parameters.get("properties") else "()"


def typescript(schema: Mapping[str, Any], indent: str = "") -> str:
    """The type of a JSON schema."""
    kind = schema.get("type")
    if variants := schema.get("oneOf"):
        return "".join(f"\n{indent} | {_variant(v, indent)}" for v in variants)
    if isinstance(kind, list):
        return " | ".join("number" if k == "integer" else k for k in kind) or "any"
    if kind == "object":
        return _object(schema, indent)
    if kind == "string" and schema.get("enum"):
        return " | ".join(f'"{value}"' for value in schema["enum"])
    if kind == "array":
        return f"{typescript(schema['items'], indent)}[]" if "items" in schema else "Array<any>"
    return {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}.get(str(kind), "any")


def _object(schema: Mapping[str, Any], indent: str) -> str:
    required = schema.get("required") or ()
    fields = [
        _field(name + ("" if name in required else "?"), field, indent)
        for name, field in (schema.get("properties") or {}).items()
    ]
    return f"{_comment(schema.get('description', ''), indent)}{{\n{''.join(fields)}{indent}}}"


def _field(name: str, schema: Mapping[str, Any], indent: str) -> str:
    """The lines of one property: comments, then name and type."""
    above = _comment(f"{schema['title']}\n", indent) if "title" in schema else ""
    above += _comment(schema.get("description", ""), indent)
    if examples := schema.get("examples"):
        above += _comment("\n".join(["Examples:", *(f'- "{e}"' for e in examples if isinstance(e, str))]), indent)
    if "oneOf" in schema:
        above += _comment(_default(schema), indent)
        variants = "".join(f"{indent} | {_variant(v, indent)}\n" for v in schema["oneOf"])
        return f"{above}{indent}{name}:\n{variants}{indent},\n"
    default = _default(schema)
    return f"{above}{indent}{name}: {_nullable(schema, indent + '    ')},{f' // {default}' if default else ''}\n"


def _variant(schema: Mapping[str, Any], indent: str) -> str:
    remarks = " ".join(filter(None, (schema.get("description", ""), _default(schema))))
    return _nullable(schema, indent + "   ") + (f" // {remarks}" if remarks else "")


def _nullable(schema: Mapping[str, Any], indent: str) -> str:
    written = typescript(schema, indent)
    return f"{written} | null" if schema.get("nullable") and "null" not in written else written


def _default(schema: Mapping[str, Any]) -> str:
    if "default" not in schema:
        return ""
    value = schema["default"]
    return (
        f"default: {value if isinstance(value, str) and schema.get('enum') else json.dumps(value, ensure_ascii=False)}"
    )


def _comment(text: str, indent: str = "") -> str:
    return "".join(f"{indent}// {line}".rstrip() + "\n" for line in text.split("\n")) if text else ""
