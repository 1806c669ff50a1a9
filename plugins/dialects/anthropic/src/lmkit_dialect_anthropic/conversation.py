"""A conversation of blocks as chat templates read it: messages with text, reasoning, calls and their results."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lmkit_http.dialect import UnsupportedField
from lmkit_http.strict import Echoed, InvalidBody, check_arguments

from lmkit_dialect_anthropic.schema import Block, CountRequest, Tool

_MEDIA = {"image": "images", "document": "documents"}
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

    def tools(self, tools: Collection[Tool]) -> list[dict[str, Any]]:
        """As functions. Raises RequestError for those that a server of Anthropic would run itself."""
        found = []
        for i, tool in enumerate(tools):
            if tool.type not in (None, "custom"):
                raise UnsupportedField(
                    f"tools.{i}.type", f"nothing here runs tools of type {tool.type!r}",
                    fix='declare it with "input_schema", and run it where it is called',
                )  # fmt: skip
            if tool.input_schema is None:
                raise InvalidBody(f"tools.{i}.input_schema is required", f"tools.{i}.input_schema")
            self._extra(tool, "tools")
            function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
            found.append(
                {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}
            )  # fmt: skip
        return found

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
            elif block.type == "redacted_thinking":
                self.dropped.add("messages.content.redacted_thinking")
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
        if block.type != "text":
            what = _MEDIA.get(block.type, f"blocks of type {block.type!r}")
            raise UnsupportedField(f"{where}.type", f"this model takes no {what} here", fix="send blocks of text")
        if block.text is None:
            raise InvalidBody(f"{where}.text is required", f"{where}.text")
        self._extra(block, "messages.content")
        return block.text

    def _extra(self, value: Echoed, where: str) -> None:
        """What clients decorate with, and nobody here reads."""
        self.dropped |= {f"{where}.{name}" for name, v in (value.model_extra or {}).items() if v not in (None, [], {})}
