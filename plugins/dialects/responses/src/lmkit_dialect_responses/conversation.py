"""A conversation of items as chat templates read it: messages with text, reasoning, calls and their results."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from typing import Any

from lmkit.api import ToolChoice
from lmkit_http.dialect import UnsupportedField
from lmkit_http.messages import part_text
from lmkit_http.strict import Echoed, InvalidBody, as_arguments, check_arguments
from pydantic import TypeAdapter, ValidationError

from lmkit_dialect_responses.offers import Offer, Offers, custom_arguments, custom_function
from lmkit_dialect_responses.schema import CountRequest, Item, NamedTool, Part, Tool
from lmkit_dialect_responses.servers import Remote, Servers, fault_text

_SEAL = "lmkit."  # before reasoning that clients send back unread
_AS_FUNCTION = 'declare a tool of type "function", and run it where its calls are read'
# items about tools that clients run, and the name that the model knows such a tool by
_RUN_BY_CLIENTS = {"local_shell_call": "local_shell", "shell_call": "shell", "apply_patch_call": "apply_patch"}
_CALLS = frozenset({"function_call", "custom_tool_call", "tool_search_call", "mcp_call", *_RUN_BY_CLIENTS})
_RESULTS = frozenset({"function_call_output", "custom_tool_call_output", "tool_search_output",
                      *(f"{kind}_output" for kind in _RUN_BY_CLIENTS)})  # fmt: skip
# what services did: the model said what came of it
_LEFT_OUT = frozenset({"web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call"})
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
        self.offers = Offers()
        self._servers = servers or Servers()
        self._late: list[dict[str, Any]] = []  # results of calls that others of the same answer may follow
        self._messages: list[dict[str, Any]] = []
        self.places: list[str] = []  # what the client calls the first item of each message
        self._calls: dict[str, str] = {}  # id of a call -> the tool's name, which templates show beside the result
        self._open: dict[str, str] = {}  # id of a call without a result -> its place

    def messages(self, instructions: str | None, items: Iterable[Placed]) -> list[dict[str, Any]]:
        """Raises RequestError."""
        readers = {
            "message": self._message, "reasoning": self._reasoning, "mcp_call": self._remote_call,
            "mcp_list_tools": self._listing, "additional_tools": self._listing, "compaction": self._summary,
            **dict.fromkeys(_CALLS - {"mcp_call"}, self._call), **dict.fromkeys(_RESULTS, self._result),
        }  # fmt: skip
        if instructions:
            self._messages.append({"role": "system", "content": instructions})
            self.places.append("instructions")
        for where, item in items:
            if item.kind in _LEFT_OUT:
                self.dropped.add(f"input.{item.kind}")
                continue
            if item.kind not in readers:
                raise UnsupportedField(
                    f"{where}.type", f"items of type {item.kind!r} are not read here",
                    fix=f"send {', '.join(sorted(readers))}",
                )  # fmt: skip
            self._extra(item, "input")
            if item.kind not in _CALLS:
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

    def _summary(self, where: str, item: Item) -> None:
        """Reads a summary that this server wrote of earlier turns."""
        text = _unsealed(item.encrypted_content or "")
        if text is None:
            raise UnsupportedField(
                f"{where}.encrypted_content", "this summary was written by another server",
                fix="send the items that it stands for",
            )  # fmt: skip
        self._answer("content", "tool_calls")["content"] = f"Summary of the conversation so far:\n{text}"

    def _call(self, where: str, item: Item) -> None:
        """A call of a tool that the client runs."""
        if item.kind == "tool_search_call" and item.call_id is None:
            self.dropped.add("input.tool_search_call")  # a service searched
            return
        field = {"custom_tool_call": "input", "local_shell_call": "action", "shell_call": "action",
                 "apply_patch_call": "operation"}.get(item.kind, "arguments")  # fmt: skip
        named = item.kind in ("function_call", "custom_tool_call")
        for name in ("call_id", *(("name",) if named else ()), field):
            if getattr(item, name) is None:
                raise InvalidBody(f"{where}.{name} is required", f"{where}.{name}")
        assert item.call_id is not None
        value = getattr(item, field)
        arguments = custom_arguments(value) if item.kind == "custom_tool_call" else as_arguments(value)
        if named:
            name = self.offers.name_of(item.namespace, item.name or "")
        else:
            name = _RUN_BY_CLIENTS.get(item.kind, _SEARCH)
        self._open[item.call_id] = where
        self._called(where, item.call_id, name, arguments)

    def _called(self, where: str, id: str, name: str, arguments: str) -> None:
        check_arguments(arguments, f"{where}.arguments")
        if id in self._calls:
            raise UnsupportedField(f"{where}.call_id", f"two calls have the id {id[:100]!r}")
        self._calls[id] = name
        calls = self._answer().setdefault("tool_calls", [])
        calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def _remote_call(self, where: str, item: Item) -> None:
        """A call that was answered here, or failed."""
        for name in ("id", "name", "arguments"):
            if getattr(item, name) is None:
                raise InvalidBody(f"{where}.{name} is required", f"{where}.{name}")
        assert item.id is not None
        assert item.name is not None
        self._called(where, item.id, item.name, item.arguments or "")
        content = (
            self._output(item.kind, item.output or "", f"{where}.output") if not item.error else fault_text(item.error)
        )
        self._late.append({"role": "tool", "tool_call_id": item.id, "name": item.name, "content": content})

    def _listing(self, where: str, item: Item) -> None:
        """Which tools a server has is asked of the server, for each request."""

    def _results(self) -> None:
        """What calls of one answer were told follows all of them."""
        self._messages += self._late
        self._late = []

    def _result(self, where: str, item: Item) -> None:
        output: str | list[Part] | list[dict[str, Any]] | None = item.output
        id = item.call_id
        if item.kind == "tool_search_output":
            if id is None:
                return  # a service searched
            names = [str(tool.get("name")) for tool in item.tools or () if isinstance(tool, dict)]
            output = json.dumps({"tools": names}, ensure_ascii=False)
        elif item.kind == "local_shell_call_output":
            id = id or item.id
        if id is None or output is None:
            name = f"{where}.{'call_id' if id is None else 'output'}"
            raise InvalidBody(f"{name} is required", name)
        if id not in self._calls:
            raise UnsupportedField(
                f"{where}.call_id", f"there is no call {id[:100]!r} before its result",
                fix="send the item of its call, too, or previous_response_id",
            )  # fmt: skip
        self._open.pop(id, None)
        self._messages.append({"role": "tool", "tool_call_id": id, "name": self._calls[id],
                               "content": self._output(item.kind, output, f"{where}.output")})  # fmt: skip

    def _output(self, kind: str, output: str | list[Part] | list[dict[str, Any]], where: str) -> Parts:
        """The answer of a tool: a text, parts, or the results of commands."""
        if isinstance(output, str):
            return output
        parts = [part for part in output if isinstance(part, Part)]
        if len(parts) == len(output):
            return self._text(parts, where)
        if kind not in _RESULTS - {"function_call_output", "custom_tool_call_output"}:
            raise InvalidBody(f"{where} needs a text or parts with a type", where)
        return json.dumps(output, ensure_ascii=False)

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

    def tools(self, request: CountRequest, items: Sequence[Placed]) -> tuple[list[dict[str, Any]], ToolChoice]:
        """The functions that the model is offered, and what the client says of calling them. Raises RequestError.

        Tools may stand in the request, and in items: the client adds some on the way.
        """
        placed = [(f"tools.{i}", tool) for i, tool in enumerate(request.tools or ())]
        later = [(f"{where}.tools.{i}", tool) for where, item in items if item.kind in _DECLARING
                 for i, tool in enumerate(_tools_of(item, where))]  # fmt: skip
        functions = self._functions([*placed, *later], request)
        if later:  # clients declare a tool again: the last one holds
            functions = list({function["function"]["name"]: function for function in functions}.values())
        choice = request.tool_choice
        if not isinstance(choice, NamedTool):
            return functions, ToolChoice(choice or "auto")
        if choice.type == "mcp" and choice.name is None:
            raise UnsupportedField("tool_choice.name", "a call of any tool of one server cannot be asked for",
                                   fix='send a name, or tool_choice "required"')  # fmt: skip
        if choice.type in ("function", "custom", "mcp"):
            if choice.name is None:
                raise InvalidBody("tool_choice.name is required", "tool_choice.name")
            return functions, ToolChoice("named", self.offers.name_of(choice.namespace, choice.name))
        if choice.type != "allowed_tools":
            raise _nobody_runs("tool_choice.type", choice.type)
        names = {name for tool in choice.tools or () for name in self._names(tool, choice.mode)}
        known = {function["function"]["name"] for function in functions}
        if missing := sorted(names - known):
            raise UnsupportedField("tool_choice.tools", f"there is no tool {missing[0][:100]!r}")
        allowed = [function for function in functions if function["function"]["name"] in names]
        return allowed, ToolChoice(choice.mode or "auto")

    def _names(self, tool: Tool, mode: str | None) -> list[str]:
        """The functions that an entry of allowed tools means."""
        if tool.type == "mcp" and tool.name is None:
            return [one.name for one in self.remote.values() if one.label == tool.server_label]
        if tool.type == "namespace" and tool.name is not None:
            return self.offers.names_in(tool.name)
        if tool.type not in ("function", "custom", "mcp") or tool.name is None:
            if mode == "required":
                raise _nobody_runs("tool_choice.tools", tool.type)
            self.dropped.add(f"tools.{tool.type}")
            return []
        return [self.offers.name_of((tool.model_extra or {}).get("namespace"), tool.name)]

    def _functions(self, placed: Sequence[tuple[str, Tool]], request: CountRequest) -> list[dict[str, Any]]:
        """Tools as functions. Those in namespaces come last: the others keep their names."""
        functions: list[dict[str, Any]] = []
        for where, tool in placed:
            if tool.type == "mcp":
                functions += self._remote(tool, where)
            elif tool.type != "namespace":
                functions += self._offered(tool, where, None, request)
        for where, tool in placed:
            if tool.type == "namespace":
                if tool.name is None:
                    raise InvalidBody(f"{where}.name is required", f"{where}.name")
                self._extra(tool, "tools")
                for i, member in enumerate(tool.tools or ()):
                    functions += self._offered(member, f"{where}.tools.{i}", tool.name, request)
        return functions

    def _remote(self, tool: Tool, where: str) -> list[dict[str, Any]]:
        """The tools of an MCP server that may be used."""
        self._extra(tool, "tools")
        if tool.server_description:
            self.dropped.add("tools.server_description")
        functions = []
        for one in self._servers.tools(tool, where):
            if one.name in self.remote:
                raise UnsupportedField(where, f"two servers have a tool {one.name[:100]!r}",
                                       fix="choose among their tools with allowed_tools")  # fmt: skip
            self.remote[one.name] = one
            self.offers.add(Offer(one.name))
            functions.append({"type": "function", "function": one.function})
        return functions

    def _offered(
        self, tool: Tool, where: str, namespace: str | None, request: CountRequest
    ) -> list[dict[str, Any]]:  # fmt: skip
        """The function for a tool of the client; none for one that some service would run."""
        searches = tool.type == "tool_search" and tool.execution == "client"
        if tool.type not in ("function", "custom") and not searches:
            if request.tool_choice == "required":
                raise _nobody_runs(f"{where}.type", tool.type)
            self.dropped.add(f"tools.{tool.type}")
            return []
        name = _SEARCH if searches else tool.name
        if name is None:
            raise InvalidBody(f"{where}.name is required", f"{where}.name")
        self._extra(tool, "tools")
        if tool.type == "custom":
            form = tool.format or {}
            if form.get("type") == "grammar":
                self.dropped.add("tools.format")
            offered = self.offers.add(Offer(name, namespace, "custom"))
            texts = (form.get(field) for field in ("syntax", "definition"))
            syntax, definition = (text if isinstance(text, str) else None for text in texts)
            return [{"type": "function", "function": custom_function(offered, tool.description, syntax, definition)}]
        offered = self.offers.add(Offer(name, namespace, "search" if searches else "call"))
        function = {
            "name": offered, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict,
        }  # fmt: skip
        return [{"type": "function", "function": {k: v for k, v in function.items() if v is not None}}]


_SEARCH = "tool_search"  # the function that stands for a search for tools
_DECLARING = ("additional_tools", "tool_search_output")  # items with tools that the client adds
_TOOLS: TypeAdapter[list[Tool]] = TypeAdapter(list[Tool])


def _tools_of(item: Item, where: str) -> list[Tool]:
    """The tools that an item declares. Raises InvalidBody."""
    try:
        return _TOOLS.validate_python(item.tools or [])
    except ValidationError as error:
        path = ".".join(str(step) for step in error.errors()[0]["loc"])[:200]
        raise InvalidBody(f"{where}.tools.{path} is wrong or missing", f"{where}.tools.{path}") from None


def _nobody_runs(field: str, kind: str) -> UnsupportedField:
    return UnsupportedField(field, f"nothing here runs tools of type {kind!r}", fix=_AS_FUNCTION)


def _parts(content: Parts) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
