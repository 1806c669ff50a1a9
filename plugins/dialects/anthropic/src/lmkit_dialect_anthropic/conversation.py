"""A conversation of blocks as chat templates read it: messages with text, reasoning, calls and their results."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lmkit_http.dialect import UnsupportedField
from lmkit_http.strict import Echoed, InvalidBody, check_arguments

from lmkit_dialect_anthropic.schema import Block, CountRequest, Tool

_MEDIA = {"image": "images", "document": "documents"}
# reasoning that only its author can read, and what services did: the model said what came of it
_LEFT_OUT = frozenset({
    "redacted_thinking", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "mcp_tool_use",
    "mcp_tool_result", "code_execution_tool_result", "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result", "tool_search_tool_result", "container_upload",
})  # fmt: skip
Parts = str | list[dict[str, Any]]


class Reader:
    """Reads one request. `dropped` gets the names of what is left out."""

    def __init__(self, words: Collection[str], dropped: set[str]) -> None:
        """`words`: names and texts in the chat template."""
        self._words, self.dropped = words, dropped
        self.places: list[str] = []  # what the client calls each of the messages
        self._tools: dict[str, str] = {}  # id of a call -> the tool's name, which templates show beside the result

    def messages(self, request: CountRequest) -> list[dict[str, Any]]:
        """Raises RequestError."""
        found: list[dict[str, Any]] = []
        if request.system:
            found.append({"role": "system", "content": self._text(request.system, "system")})
            self.places.append("system")
        for i, message in enumerate(request.messages):
            self._extra(message, "messages")
            where = f"messages.{i}.content"
            if isinstance(message.content, str) or message.role == "system":
                found.append({"role": message.role, "content": self._text(message.content, where)})
            elif message.role == "assistant":
                found.append(self._assistant(message.content, where))
            else:
                found += self._user(message.content, where)
            self.places += [where] * (len(found) - len(self.places))
        last = found[-1]
        if last["role"] == "assistant" and not last.get("content"):
            raise UnsupportedField(
                self.places[-1], "the last message ends with calls, or is empty", fix="send the results of its calls"
            )
        return found

    def tools(self, tools: Collection[Tool], required: bool = False) -> list[dict[str, Any]]:
        """The tools as functions. A tool without a schema is one that a service of Anthropic describes or runs: it is
        left out, and refused when a call is `required`. Raises RequestError."""
        functions = []
        for i, tool in enumerate(tools):
            if tool.type not in (None, "custom"):
                if required:
                    raise UnsupportedField(
                        f"tools.{i}.type", f"nothing here runs tools of type {tool.type!r}",
                        fix='declare it with "input_schema", and run it where it is called',
                    )  # fmt: skip
                self.dropped.add(f"tools.{tool.type}")
                continue
            if tool.input_schema is None:
                raise InvalidBody(f"tools.{i}.input_schema is required", f"tools.{i}.input_schema")
            self._extra(tool, "tools")
            function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
            functions.append(
                {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}
            )  # fmt: skip
        return functions

    def _user(self, blocks: list[Block], where: str) -> list[dict[str, Any]]:
        """Results of calls are messages of their own, in order with what is said around them."""
        found: list[dict[str, Any]] = []
        for i, block in enumerate(blocks):
            if block.type == "tool_result":
                found.append(self._result(block, f"{where}.{i}"))
                continue
            part = {"type": "text", "text": self._said(block, f"{where}.{i}")}
            if not found or found[-1]["role"] != "user":
                found.append({"role": "user", "content": []})
            found[-1]["content"].append(part)
        return found or [{"role": "user", "content": ""}]

    def _result(self, block: Block, where: str) -> dict[str, Any]:
        if block.tool_use_id is None:
            raise InvalidBody(f"{where}.tool_use_id is required", f"{where}.tool_use_id")
        self._extra(block, "messages.content")
        if isinstance(block.content, dict):
            raise InvalidBody(f"{where}.content needs a text or blocks", f"{where}.content")
        content: Parts = "" if block.content is None else self._text(block.content, f"{where}.content")
        if block.is_error and "is_error" not in self._words:
            self.dropped.add("messages.content.is_error")
        found = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        if name := self._tools.get(block.tool_use_id):
            found["name"] = name
        return found

    def _assistant(self, blocks: list[Block], where: str) -> dict[str, Any]:
        said: list[dict[str, Any]] = []
        thoughts, calls = [], []
        for i, block in enumerate(blocks):
            if block.type == "thinking":
                thoughts.append(block.thinking or "")
            elif block.type in _LEFT_OUT:
                self.dropped.add(f"messages.content.{block.type}")
            elif block.type == "tool_use":
                calls.append(self._call(block, f"{where}.{i}"))
            else:
                said.append({"type": "text", "text": self._said(block, f"{where}.{i}")})
        message: dict[str, Any] = {"role": "assistant", "content": said or None}
        if thought := "\n".join(filter(None, thoughts)):
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        return message

    def _call(self, block: Block, where: str) -> dict[str, Any]:
        for name in ("id", "name"):
            if getattr(block, name) is None:
                raise InvalidBody(f"{where}.{name} is required", f"{where}.{name}")
        assert block.id is not None
        assert block.name is not None
        self._extra(block, "messages.content")
        self._tools[block.id] = block.name
        check_arguments(block.input, f"{where}.input")
        return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}

    def _text(self, content: str | list[Block], where: str) -> Parts:
        if isinstance(content, str):
            return content
        return [{"type": "text", "text": self._said(block, f"{where}.{i}")} for i, block in enumerate(content)]

    def _said(self, block: Block, where: str) -> str:
        """Raises RequestError for a block that is no text."""
        if (text := _document(block)) is not None:
            self._extra(block, "messages.content", but=("source", "title", "context"))
            return text
        if block.type != "text":
            what = _MEDIA.get(block.type, f"blocks of type {block.type!r}")
            raise UnsupportedField(f"{where}.type", f"this model takes no {what} here", fix="send blocks of text")
        if block.text is None:
            raise InvalidBody(f"{where}.text is required", f"{where}.text")
        self._extra(block, "messages.content")
        return block.text

    def _extra(self, value: Echoed, where: str, but: Collection[str] = ()) -> None:
        """What clients decorate with, and nobody here reads."""
        self.dropped |= {f"{where}.{name}" for name, v in (value.model_extra or {}).items()
                         if v not in (None, [], {}) and name not in but}  # fmt: skip


def _document(block: Block) -> str | None:
    """The text of a document that is plain text, under its title; None for any other block."""
    more = block.model_extra or {}
    source = more.get("source")
    if block.type != "document" or not isinstance(source, dict) or source.get("type") != "text":
        return None
    texts = (more.get("title"), more.get("context"), source.get("data"))
    return "\n\n".join(text for text in texts if isinstance(text, str) and text)
