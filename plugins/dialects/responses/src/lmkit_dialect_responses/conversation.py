"""A conversation of items as chat templates read it: messages with text, reasoning, calls and their results."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from typing import Any

from lmkit.api import ToolChoice
from lmkit_http.dialect import UnsupportedField
from lmkit_http.messages import part_text
from lmkit_http.strict import Echoed, InvalidBody, check_arguments

from lmkit_dialect_responses.schema import CountRequest, Item, NamedTool, Part, Tool
from lmkit_dialect_responses.servers import Remote, Servers, fault_text

_SEAL = "lmkit."  # before reasoning that clients send back unread
_AS_FUNCTION = 'declare a tool of type "function", and run it where its calls are read'
_INSTEAD = {
    "custom": 'declare a tool of type "function" whose parameters have one text',
}
Parts = str | list[dict[str, Any]]
Placed = tuple[str, Item]  # an item and what the client calls its place


def sealed(text: str) -> str:
    """Reasoning for clients that keep no other field of it. Nothing is secret: they may read it beside."""
    return _SEAL + b64encode(text.encode()).decode()


def _unsealed(text: str) -> str | None:
    """None: it is not ours."""
    try:
        return b64decode(text.removeprefix(_SEAL), validate=True).decode() if text.startswith(_SEAL) else None
    except ValueError:
        return None


class Reader:
    """Reads one request. `dropped` gets the names of what is left out, `remote` the tools of MCP servers by name."""

    def __init__(self, dropped: set[str], servers: Servers | None = None) -> None:
        self.dropped = dropped
        self.remote: dict[str, Remote] = {}
        self._servers = servers or Servers()
        self._late: list[dict[str, Any]] = []  # results of calls that others of the same answer may follow
        self._messages: list[dict[str, Any]] = []
        self.places: list[str] = []  # what the client calls the first item of each message
        self._calls: dict[str, str] = {}  # id of a call -> the tool's name, which templates show beside the result
        self._open: dict[str, str] = {}  # id of a call without a result -> its place

    def messages(self, instructions: str | None, items: Iterable[Placed]) -> list[dict[str, Any]]:
        """Raises RequestError."""
        readers = {
            "message": self._message, "reasoning": self._reasoning, "function_call": self._call,
            "function_call_output": self._result, "mcp_call": self._remote_call, "mcp_list_tools": self._listing,
        }  # fmt: skip
        if instructions:
            self._messages.append({"role": "system", "content": instructions})
            self.places.append("instructions")
        for where, item in items:
            if item.kind not in readers:
                raise UnsupportedField(
                    f"{where}.type", f"items of type {item.kind!r} are not read here",
                    fix=f"send {', '.join(readers)}",
                )  # fmt: skip
            self._extra(item, "input")
            if item.kind not in ("mcp_call", "function_call"):
                self._results()
            readers[item.kind](where, item)
            self.places += [where] * (len(self._messages) - len(self.places))
        self._results()
        self.places += ["input"] * (len(self._messages) - len(self.places))
        if not self._messages:
            raise InvalidBody("input is required", "input")
        for id, where in self._open.items():
            raise UnsupportedField(
                where, f"the call {id[:100]!r} has no result", fix="send an item of type function_call_output for it"
            )
        for message in self._messages:
            if message["role"] == "assistant" and not message.get("tool_calls"):
                message.setdefault("content", "")
        return self._messages

    def _message(self, where: str, item: Item) -> None:
        if item.content is None or item.role is None:
            name = f"{where}.{'role' if item.role is None else 'content'}"
            raise InvalidBody(f"{name} is required", name)
        content = self._text(item.content, f"{where}.content")
        if item.role == "assistant":
            self._answer("content", "tool_calls")["content"] = content
            return
        role = "system" if item.role == "developer" else item.role
        if role == "system" and [message["role"] for message in self._messages] == ["system"]:
            first = self._messages[0]  # templates take one, at the beginning
            first["content"] = [*_parts(first["content"]), *_parts(content)]
        else:
            self._messages.append({"role": role, "content": content})

    def _reasoning(self, where: str, item: Item) -> None:
        parts = item.content if isinstance(item.content, list) and item.content else item.summary or []
        text = "\n".join(part.text for part in parts if part.text)
        if not text and item.encrypted_content:
            opened = _unsealed(item.encrypted_content)
            if opened is None:
                self.dropped.add("input.encrypted_content")
            text = opened or ""
        if text:
            message = self._answer("content", "tool_calls")
            before = message.get("reasoning_content")
            message["reasoning_content"] = f"{before}\n{text}" if before else text

    def _call(self, where: str, item: Item) -> None:
        for name in ("call_id", "name", "arguments"):
            if getattr(item, name) is None:
                raise InvalidBody(f"{where}.{name} is required", f"{where}.{name}")
        assert item.call_id is not None
        self._open[item.call_id] = where
        self._called(where, item, item.call_id)

    def _called(self, where: str, item: Item, id: str) -> None:
        assert item.name is not None
        assert item.arguments is not None
        check_arguments(item.arguments, f"{where}.arguments")
        if id in self._calls:
            raise UnsupportedField(f"{where}.call_id", f"two calls have the id {id[:100]!r}")
        self._calls[id] = item.name
        function = {"name": item.name, "arguments": item.arguments}
        calls = self._answer().setdefault("tool_calls", [])
        calls.append({"id": id, "type": "function", "function": function})

    def _remote_call(self, where: str, item: Item) -> None:
        """A call that was answered here, or failed."""
        for name in ("id", "name", "arguments"):
            if getattr(item, name) is None:
                raise InvalidBody(f"{where}.{name} is required", f"{where}.{name}")
        assert item.id is not None
        self._called(where, item, item.id)
        content = self._text(item.output or "", f"{where}.output") if not item.error else fault_text(item.error)
        self._late.append({"role": "tool", "tool_call_id": item.id, "name": item.name, "content": content})

    def _listing(self, where: str, item: Item) -> None:
        """Which tools a server has is asked of the server, for each request."""

    def _results(self) -> None:
        """What calls of one answer were told follows all of them."""
        self._messages += self._late
        self._late = []

    def _result(self, where: str, item: Item) -> None:
        if item.call_id is None or item.output is None:
            name = f"{where}.{'call_id' if item.call_id is None else 'output'}"
            raise InvalidBody(f"{name} is required", name)
        if item.call_id not in self._calls:
            raise UnsupportedField(
                f"{where}.call_id", f"there is no call {item.call_id[:100]!r} before its result",
                fix="send the item of type function_call, too, or previous_response_id",
            )  # fmt: skip
        self._open.pop(item.call_id, None)
        content = self._text(item.output, f"{where}.output")
        self._messages.append(
            {"role": "tool", "tool_call_id": item.call_id, "name": self._calls[item.call_id], "content": content}
        )

    def _answer(self, *ended_by: str) -> dict[str, Any]:
        """The answer that goes on, unless it has one of `ended_by`; or a new one."""
        last = self._messages[-1] if self._messages else None
        if last is None or last["role"] != "assistant" or any(name in last for name in ended_by):
            last = {"role": "assistant"}
            self._messages.append(last)
        return last

    def _text(self, content: str | list[Part], where: str) -> Parts:
        if isinstance(content, str):
            return content
        for part in content:
            self._extra(part, "input.content")
        texts = [part_text(part, f"{where}.{i}") for i, part in enumerate(content)]
        return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]

    def _extra(self, value: Echoed, where: str) -> None:
        """What clients decorate with, and nobody here reads."""
        self.dropped |= {f"{where}.{name}" for name, v in (value.model_extra or {}).items() if v not in (None, [], {})}

    def tools(self, request: CountRequest) -> tuple[list[dict[str, Any]], ToolChoice]:
        """The tools as functions, and what the client says of calling them. Raises RequestError."""
        tools = [function for i, tool in enumerate(request.tools or ()) for function in self._functions(tool, i)]
        choice = request.tool_choice
        if not isinstance(choice, NamedTool):
            return tools, ToolChoice(choice or "auto")
        if choice.type == "mcp" and choice.name is None:
            raise UnsupportedField("tool_choice.name", "a call of any tool of one server cannot be asked for",
                                   fix='send a name, or tool_choice "required"')  # fmt: skip
        if choice.type in ("function", "mcp"):
            if choice.name is None:
                raise InvalidBody("tool_choice.name is required", "tool_choice.name")
            return tools, ToolChoice("named", choice.name)
        if choice.type != "allowed_tools":
            raise UnsupportedField(
                "tool_choice.type", f"nothing here runs tools of type {choice.type!r}", fix=_instead(choice.type)
            )
        names = {name for tool in choice.tools or () for name in self._names(tool)}
        known = {tool["function"]["name"] for tool in tools}
        if missing := [name for name in names if name not in known]:
            raise UnsupportedField("tool_choice.tools", f"there is no tool {str(missing[0])[:100]!r}")
        allowed = [tool for tool in tools if tool["function"]["name"] in names]
        return allowed, ToolChoice(choice.mode or "auto")

    def _names(self, tool: Tool) -> list[str | None]:
        """The functions that an entry of allowed tools means."""
        if tool.type == "mcp" and tool.name is None:
            return [one.name for one in self.remote.values() if one.label == tool.server_label]
        return [tool.name]

    def _functions(self, tool: Tool, number: int) -> Iterator[dict[str, Any]]:
        """A tool as a function; of an MCP server all those of its tools that may be used."""
        where = f"tools.{number}"
        if tool.type == "mcp":
            self._extra(tool, "tools")
            if tool.server_description:
                self.dropped.add("tools.server_description")
            for one in self._servers.tools(tool, where):
                if one.name in self.remote:
                    raise UnsupportedField(where, f"two servers have a tool {one.name[:100]!r}",
                                           fix="choose among their tools with allowed_tools")  # fmt: skip
                self.remote[one.name] = one
                yield {"type": "function", "function": one.function}
        else:
            yield self._function(tool, where)

    def _function(self, tool: Tool, where: str) -> dict[str, Any]:
        if tool.type != "function":
            raise UnsupportedField(
                f"{where}.type", f"nothing here runs tools of type {tool.type!r}", fix=_instead(tool.type)
            )
        if tool.name is None:
            raise InvalidBody(f"{where}.name is required", f"{where}.name")
        self._extra(tool, "tools")
        function = {
            "name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict,
        }  # fmt: skip
        return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _instead(kind: str) -> str:
    return _INSTEAD.get(kind, _AS_FUNCTION)


def _parts(content: Parts) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
