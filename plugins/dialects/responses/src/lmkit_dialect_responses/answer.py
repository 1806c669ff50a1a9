"""/v1/responses: a body becomes the ask of a conversation, its message items, whole or as events.

A whole answer lists an item for each part of the message. A stream tells how the same parts grow, and its last event
has the same whole answer. Calls of tools of MCP servers are made when their turn has ended; then the conversation goes
on with what they said, in another turn of the same answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import msgspec
from lmkit.api import ErrorInfo, SamplingParams
from lmkit_http.dialect import Change, ChatAsk, Exchange, Finish, Message, Part, Served, Turn, Usage
from lmkit_http.logprobs import ContentLogprob, content_logprobs

from lmkit_dialect_responses.conversation import Placed, Reader, sealed
from lmkit_dialect_responses.history import as_items, items_of, kept_item
from lmkit_dialect_responses.offers import custom_input, search_arguments
from lmkit_dialect_responses.schema import CountRequest, NamedTool, ResponsesRequest, Tool
from lmkit_dialect_responses.servers import Pinned, Servers, protocol_fault
from lmkit_dialect_responses.store import Kept, Store, progress
from lmkit_dialect_responses.usage import usage_of

MAX_CALLS = 64  # of tools of MCP servers in one answer; a request may allow fewer
_encode = msgspec.json.encode
_PREFIX = {"reasoning": "rs", "content": "msg", "call": "fc", "custom": "ctc", "search": "tsc", "mcp": "mcp"}
_DELTA = {"reasoning": "reasoning_text", "content": "output_text", "call": "function_call_arguments",
          "custom": "custom_tool_call_input", "mcp": "mcp_call_arguments"}  # fmt: skip
_WHOLE = ("custom", "search")  # calls whose items are made of whole arguments
CLIENT_CALLS = ("function_call", "custom_tool_call", "tool_search_call")
_ENDS = {"completed": "response.completed", "incomplete": "response.incomplete", "failed": "response.failed"}


class Respond(Exchange):
    """One request: its answer as an object, or as events."""

    def __init__(
        self, request: ResponsesRequest, served: Served, store: Store, tenant: str, servers: Servers,
        id: str | None = None,
    ) -> None:  # fmt: skip
        """`id`: of an answer in the background, which is kept already."""
        items, own = items_of(request, store, tenant)
        servers = Pinned(servers)
        reader = Reader(request.dropped, servers)
        self._left = min(MAX_CALLS, MAX_CALLS if request.max_tool_calls is None else request.max_tool_calls)
        super().__init__(ask_of(_with_calls(request, self._left), served, items, reader))
        self._key: str = id.removeprefix("resp_") if id is not None else uuid4().hex
        self.id = f"resp_{self._key}"
        self.streamed = bool(request.stream)
        self._request, self._served, self._servers = request, served, servers
        self._tokenizer, self._model = served.tokenizer, request.model or served.names[0]
        self._created = progress(store.get(tenant, id)).created_at if id is not None else int(time.time())
        self._store = store if request.store is not False else None
        self._background = bool(request.background)
        self._tenant, self._asked = tenant, _encode([kept_item(item) for item in own])
        self.headers = {"x-request-id": self.id}
        self._items, self._remote, self._offers = items, reader.remote, reader.offers
        self._output = self._listings(items)  # items that do not change any more
        self._results: list[dict[str, Any]] = []  # calls that were answered since the last chunk, still to be told
        self._usages: list[Usage] = []  # of turns whose items are in the output
        self._last: Turn | None = None  # the last one of these
        self._number = 0  # of the next event
        self._part = 0  # the part of the message that grows
        self._sent = -1  # pieces of it that were told; -1: not even that it began
        self._head, self._tail = b"", b""  # of what tells them

    # -- tools of MCP servers

    def _listings(self, items: list[Placed]) -> list[dict[str, Any]]:
        """Which tools the servers have, unless the conversation says so already."""
        known = {item.server_label for _, item in items if item.kind == "mcp_list_tools"}
        labels = dict.fromkeys(one.label for one in self._remote.values() if one.label not in known)
        return [
            {"id": f"mcpl_{self._key}_{i}", "type": "mcp_list_tools", "server_label": label, "error": None,
             "tools": [one.shown for one in self._remote.values() if one.label == label]}
            for i, label in enumerate(labels)
        ]  # fmt: skip

    def _kind(self, part: Part) -> str:
        if part.kind != "call":
            return part.kind
        return "mcp" if part.name in self._remote else self._offers.get(part.name).kind

    def _makes_calls(self, message: Message) -> bool:
        """Whether the message ends with calls that are made here."""
        finish = message.finish
        whole = finish is not None and finish.reason == "stop" and not finish.cut_call
        return whole and self._left > 0 and any(self._kind(part) == "mcp" for part in message.parts)

    async def more(self, turns: Sequence[Turn]) -> ChatAsk | None:
        """Makes the calls of the last turn. With their results the model goes on, unless it waits for the client, too,
        or has had its tokens."""
        message = turns[-1].message
        if not self._makes_calls(message):
            return None
        items = [self._item(message, i) for i in range(len(message.parts))]
        calls = [item for item in items if item["type"] == "mcp_call"]
        await asyncio.gather(*(self._call(item) for item in calls[: self._left]))
        for item in calls[self._left :]:
            item |= {"error": protocol_fault("as many calls were made as are allowed"), "status": "failed"}
        self._left = max(0, self._left - len(calls))
        self._output += items
        self._results, self._last = items, turns[-1]
        self._usages.append(turns[-1].stream.usage)
        self._part, self._sent = 0, -1
        if self._spent() or any(item["type"] in CLIENT_CALLS for item in items):
            return None
        return await asyncio.to_thread(self._next)

    async def _call(self, item: dict[str, Any]) -> None:
        remote = self._remote[item["name"]]
        output, error = await remote.server.call(remote.name, item["arguments"])
        item |= {"output": output, "error": error, "status": "failed" if error is not None else "completed"}

    def _spent(self) -> bool:
        """Whether finished turns have had all tokens of the answer."""
        return self._request.max_output_tokens is not None and self._remaining() <= 0

    def _remaining(self) -> int:
        return (self._request.max_output_tokens or 0) - sum(usage.completion_tokens for usage in self._usages)

    def _next(self) -> ChatAsk:
        """What is asked after calls were answered. Raises RequestError."""
        request = _with_calls(self._request, self._left)
        update: dict[str, Any] = {"max_output_tokens": self._remaining()} if request.max_output_tokens else {}
        choice = request.tool_choice
        if choice == "required" or (isinstance(choice, NamedTool) and choice.type != "allowed_tools"):
            update["tool_choice"] = "auto"  # it was called
        elif isinstance(choice, NamedTool):
            update["tool_choice"] = choice.model_copy(update={"mode": "auto"})
        items = [*self._items, *(("output", item) for item in as_items(msgspec.to_builtins(self._output)))]
        return ask_of(request.model_copy(update=update), self._served, items, Reader(set(), self._servers))

    # -- whole

    def whole(self, turns: Sequence[Turn]) -> bytes:
        return self._ended(turns[-1])[1]

    def _ended(self, turn: Turn) -> tuple[str, bytes]:
        """Its status and the answer, which is kept from now on."""
        message = turn.message
        assert message.finish is not None
        status, output, usages = _status(message.finish), self._output, self._usages
        if turn is not self._last:
            output = output + [self._item(message, i) for i in range(len(_parts(message)))]
            usages = [*usages, turn.stream.usage]
        elif self._spent():
            status = "incomplete"
        body = _encode(self._body(status, output, message.finish, usages))
        if self._store is not None and not self._background:
            self._store.put(self._tenant, Kept(self.id, self._request.previous_response_id, self._asked, body))
        return status, body

    def queued(self) -> Kept:
        """The answer before it is made."""
        body = _encode(self._body("queued", []))
        return Kept(self.id, self._request.previous_response_id, self._asked, body)

    def _body(
        self, status: str, output: list[Any], finish: Finish | None = None, usages: Sequence[Usage] = ()
    ) -> dict[str, Any]:  # fmt: skip
        r, ask = self._request, self.ask
        assert isinstance(ask, ChatAsk)
        aborted = finish is not None and finish.reason == "abort"
        reason = {"reason": "max_output_tokens"} if status == "incomplete" and not aborted else None
        choice = r.tool_choice.model_dump(exclude_none=True) if isinstance(r.tool_choice, NamedTool) else r.tool_choice
        form = r.text.format if r.text is not None else None
        return {
            "id": self.id, "object": "response", "created_at": self._created, "status": status, "model": self._model,
            "completed_at": int(time.time()) if status == "completed" else None, "background": self._background,
            "error": _error(finish.error if finish is not None else None), "incomplete_details": reason,
            "instructions": r.instructions, "max_output_tokens": r.max_output_tokens, "metadata": r.metadata or {},
            "output": output, "parallel_tool_calls": r.parallel_tool_calls is not False,
            "max_tool_calls": r.max_tool_calls,
            "previous_response_id": r.previous_response_id, "store": self._store is not None,
            "reasoning": {"effort": r.reasoning.effort if r.reasoning is not None else None, "summary": None},
            "temperature": ask.params.temperature, "top_p": ask.params.top_p, "top_logprobs": r.top_logprobs or 0,
            "text": {"format": form.model_dump(exclude_none=True, by_alias=True) if form else {"type": "text"},
                     "verbosity": "medium"},
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "service_tier": "default",
            "safety_identifier": r.safety_identifier, "prompt_cache_key": r.prompt_cache_key,
            **({"user": r.user} if r.user is not None else {}),
            "tool_choice": choice or "auto", "tools": [_shown_tool(tool) for tool in r.tools or ()],
            "truncation": r.truncation or "disabled", "usage": usage_of(usages) if usages else None,
        }  # fmt: skip

    def _item(self, message: Message, index: int) -> dict[str, Any]:
        """The item of a part that grows no more."""
        parts = _parts(message)
        part, last = parts[index], index == len(parts) - 1
        cut = last and message.finish is not None and message.finish.reason != "stop"
        if self._kind(part) == "mcp":
            cut = not self._makes_calls(message)
        elif part.kind == "call":
            cut = not part.complete
        item = self._begun(part, index, "incomplete" if cut else "completed")
        kind = self._kind(part)
        if kind == "custom":
            item["input"] = "" if cut else custom_input(part.text)  # any part of a text would be run
        elif kind == "search":
            item["arguments"] = {} if cut else search_arguments(part.text)
        elif part.kind == "call":
            item["arguments"] = part.text
        else:
            item["content"] = [_content(part, part.text, self._logprobs(message, index))]
        if part.kind == "reasoning" and self._request.sealed:
            item["encrypted_content"] = sealed(part.text)
        return item

    def _begun(self, part: Part, index: int, status: str) -> dict[str, Any]:
        """The item of a part without its text."""
        kind = self._kind(part)
        item: dict[str, Any] = {"id": f"{_PREFIX[kind]}_{self._key}_{len(self._output) + index}", "status": status}
        if kind == "mcp":
            label = self._remote[part.name].label
            called = {"type": "mcp_call", "server_label": label, "name": part.name, "arguments": ""}
            return {**item, **called, "output": None, "error": None, "approval_request_id": None}
        if part.kind == "call":
            names = self._offers.get(part.name).names
            if kind == "custom":
                return {**item, "type": "custom_tool_call", "call_id": part.id, **names, "input": ""}
            if kind == "search":
                return {**item, "type": "tool_search_call", "call_id": part.id, "execution": "client", "arguments": {}}
            return {**item, "type": "function_call", "call_id": part.id, **names, "arguments": ""}
        if part.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": []}
        return {**item, "type": "message", "role": "assistant", "content": []}

    def _logprobs(self, message: Message, index: int) -> list[ContentLogprob]:
        """Those of the tokens of a part of the content."""
        parts = _parts(message)
        if self._request.logprobs is None or parts[index].kind != "content":
            return []
        end = next((part.first for part in parts[index + 1 :] if part.kind == "content"), None)
        return content_logprobs(message.logprobs[parts[index].first : end], self._tokenizer, self._request.logprobs)

    # -- streamed

    def chunk(self, turn: Turn, change: Change) -> bytes:
        """Tells what the parts of the message have become since the last time."""
        out: list[bytes] = []
        if self._number == 0:
            self._open(out)
        self._tell_results(out)
        message, finish = turn.message, change.finish
        parts = _parts(message) if finish is not None else message.parts
        failed = finish is not None and finish.reason == "error"
        while self._part < len(parts):
            part = parts[self._part]
            if self._sent < 0:
                self._begin(part, out)
            if len(part.pieces) > self._sent:
                self._grow(part, change, out)
            if self._part == len(parts) - 1 and (finish is None or failed):
                break
            self._end(message, part, out)
            self._part, self._sent = self._part + 1, -1
        if finish is not None and not self._makes_calls(message):
            self._tell([self._item(message, i) for i in range(self._part)], len(self._output), out)
            self._close(turn, out)
        return b"".join(out)

    def end(self, turns: Sequence[Turn]) -> bytes:
        """An answer that ends with the results of calls."""
        out: list[bytes] = []
        if self._results:
            self._tell_results(out)
            self._close(turns[-1], out)
        return b"".join(out)

    def _open(self, out: list[bytes]) -> None:
        for kind in ("response.created", "response.in_progress"):
            out.append(self._event(kind, response=self._body("in_progress", [])))
        for i, item in enumerate(self._output):
            place = {"item_id": item["id"], "output_index": i}
            out.append(self._event("response.output_item.added", output_index=i, item={**item, "tools": []}))
            out += [self._event(f"response.mcp_list_tools.{what}", **place) for what in ("in_progress", "completed")]
            out.append(self._event("response.output_item.done", output_index=i, item=item))

    def _tell_results(self, out: list[bytes]) -> None:
        """How calls ended that were made since the last chunk."""
        results, self._results = self._results, []
        self._tell(results, len(self._output) - len(results), out)

    def _tell(self, items: list[dict[str, Any]], first: int, out: list[bytes]) -> None:
        """How those of the items ended that are calls of servers; `first`: the index of the first item."""
        for i, item in enumerate(items, first):
            if item["type"] == "mcp_call":
                if item["status"] != "incomplete":
                    out.append(self._event(f"response.mcp_call.{item['status']}", item_id=item["id"], output_index=i))
                out.append(self._event("response.output_item.done", output_index=i, item=item))

    def _close(self, turn: Turn, out: list[bytes]) -> None:
        status, body = self._ended(turn)
        out.append(self._event(_ENDS[status], response=msgspec.Raw(body)))

    def _begin(self, part: Part, out: list[bytes]) -> None:
        index, what = len(self._output) + self._part, self._kind(part)
        item = self._begun(part, self._part, "in_progress")
        out.append(self._event("response.output_item.added", output_index=index, item=item))
        if what == "mcp":
            out.append(self._event("response.mcp_call.in_progress", item_id=item["id"], output_index=index))
        if part.kind != "call":
            out.append(self._place("response.content_part.added", item["id"], part=_content(part, "", [])))
        if what in _WHOLE:
            self._sent = 0
            return
        kind = f"response.{_DELTA[what]}.delta"
        place = f'"item_id":"{item["id"]}","output_index":{index}' + (',"content_index":0' * (part.kind != "call"))
        self._head = f'event: {kind}\ndata: {{"type":"{kind}",{place},"delta":'.encode()
        self._sent = 0

    def _grow(self, part: Part, change: Change, out: list[bytes]) -> None:
        text = "".join(part.pieces[self._sent :])
        self._sent = len(part.pieces)
        if self._kind(part) in _WHOLE:
            return
        more = b""
        if part.kind == "content":
            entries = change.logprobs if self._request.logprobs is not None else []
            shown = content_logprobs(entries, self._tokenizer, self._request.logprobs or 0)
            more = b',"logprobs":' + _encode(_short(shown)) if shown else b',"logprobs":[]'
        if text:
            out.append(b'%b%b%b,"sequence_number":%d}\n\n' % (self._head, _encode(text), more, self._number))
            self._number += 1

    def _end(self, message: Message, part: Part, out: list[bytes]) -> None:
        """The part grows no more. A call of a server ends later, when it was made or cannot be."""
        item, what = self._item(message, self._part), self._kind(part)
        index = len(self._output) + self._part
        place = {"item_id": item["id"], "output_index": index}
        if what == "custom":
            if item["input"]:
                out.append(self._event(f"response.{_DELTA[what]}.delta", **place, delta=item["input"]))
            out.append(self._event(f"response.{_DELTA[what]}.done", **place, input=item["input"]))
        elif part.kind == "call":
            if what != "search":
                named = {"name": item["name"]} if what == "call" else {}
                out.append(self._event(f"response.{_DELTA[what]}.done", **place, arguments=part.text, **named))
        else:
            content = item["content"][0]
            shown = {"logprobs": _short(content["logprobs"])} if part.kind == "content" else {}
            out.append(self._place(f"response.{_DELTA[what]}.done", item["id"], text=part.text, **shown))
            out.append(self._place("response.content_part.done", item["id"], part=content))
        if what != "mcp":
            out.append(self._event("response.output_item.done", output_index=index, item=item))

    def _place(self, kind: str, id: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=id, output_index=len(self._output) + self._part, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = _encode({"type": kind, **fields, "sequence_number": self._number})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


class Count(Exchange):
    """How many tokens the prompt of a conversation has: nothing is generated."""

    played = False

    def __init__(
        self, request: CountRequest, served: Served, store: Store, tenant: str, servers: Servers
    ) -> None:  # fmt: skip
        items, _ = items_of(request, store, tenant)
        super().__init__(conversation_ask(request, served, items, Reader(request.dropped, servers)))

    def whole(self, turns: Sequence[Turn]) -> bytes:
        return _encode({"object": "response.input_tokens", "input_tokens": len(turns[0].request.token_ids)})


def ask_of(request: ResponsesRequest, served: Served, items: list[Placed], reader: Reader) -> ChatAsk:
    """Raises RequestError."""
    r = request
    ask = conversation_ask(r, served, items, reader)
    given: dict[str, Any] = dict(served.default_params)
    given |= {k: v for k in ("temperature", "top_p", "top_k", "min_p", "seed") if (v := getattr(r, k)) is not None}
    # max_output_tokens is a ceiling in this API: an answer may be shorter where the context ends
    params = SamplingParams(max_tokens=None, logprobs=r.logprobs, grammar=r.grammar, **given)
    last = served.prompt_room(r.max_output_tokens) if r.truncation == "auto" else None
    return replace(
        ask, params=params, default_tokens=r.max_output_tokens, grammar_field="text.format", last=last,
        priority=r.priority or 0, salt=r.cache_salt,
    )  # fmt: skip


def conversation_ask(request: CountRequest, served: Served, items: list[Placed], reader: Reader) -> ChatAsk:
    """The ask that every route makes of a conversation. Raises RequestError."""
    r = request
    tools, choice = reader.tools(r, items)
    messages = reader.messages(r.instructions, items)
    return ChatAsk(
        messages=messages,
        places=reader.places,
        tools=tools,
        tool_choice=choice,
        parallel_calls=r.parallel_tool_calls is not False,
        whole_calls=reader.offers.whole,
        template_options=r.chat_template_kwargs or {},
        effort=r.reasoning.effort if r.reasoning is not None else None,
        effort_field="reasoning.effort",
        adapter=served.adapter(r.model),
        prompt_field="input",
        dropped=r.dropped,
    )


def _parts(message: Message) -> list[Part]:
    """An answer has an item, if only an empty one."""
    return message.parts or [Part("content")]


def _content(part: Part, text: str, logprobs: list[ContentLogprob]) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _short(logprobs: Sequence[ContentLogprob]) -> list[dict[str, Any]]:
    """As events show them."""
    return [
        {"token": e.token, "logprob": e.logprob,
         "top_logprobs": [{"token": top.token, "logprob": top.logprob} for top in e.top_logprobs]}
        for e in logprobs
    ]  # fmt: skip


def _with_calls(request: ResponsesRequest, left: int) -> ResponsesRequest:
    """The request, without the tools of servers when no call of them is left."""
    if left > 0 or not any(tool.type == "mcp" for tool in request.tools or ()):
        return request
    tools = [tool for tool in request.tools or () if tool.type != "mcp"]
    return request.model_copy(update={"tools": tools, "tool_choice": "auto"})


def _shown_tool(tool: Tool) -> dict[str, Any]:
    if tool.type == "mcp":
        allowed = tool.allowed_names
        return {
            "type": "mcp", "server_label": tool.server_label, "server_url": tool.server_url, "allowed_tools": allowed,
            "require_approval": tool.require_approval,
        }  # fmt: skip
    if tool.type != "function":
        return tool.model_dump(exclude_none=True)
    return {
        "type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }  # fmt: skip


def _status(finish: Finish) -> str:
    return {"length": "incomplete", "abort": "incomplete", "error": "failed"}.get(finish.reason, "completed")


def _error(error: ErrorInfo | None) -> dict[str, str] | None:
    return {"code": "server_error", "message": error.message} if error is not None else None
