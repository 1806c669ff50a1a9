"""/v1/responses: a body becomes the ask of a conversation, its message items, whole or as events.

A whole answer lists an item for each part of the message. A stream tells how the same parts grow, and its last event
has the same whole answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import msgspec
from lmkit.api import ErrorInfo, SamplingParams
from lmkit_http.dialect import Change, ChatAsk, Exchange, Finish, Message, Part, Served, Turn, Usage
from lmkit_http.logprobs import ContentLogprob, content_logprobs
from lmkit_http.strict import warnings_header

from lmkit_dialect_responses.conversation import Placed, Reader, sealed
from lmkit_dialect_responses.history import items_of, kept_item
from lmkit_dialect_responses.schema import CountRequest, NamedTool, ResponsesRequest, Tool
from lmkit_dialect_responses.store import Kept, Store, progress

_encode = msgspec.json.encode
_PREFIX = {"reasoning": "rs", "content": "msg", "call": "fc"}
_DELTA = {"reasoning": "reasoning_text", "content": "output_text", "call": "function_call_arguments"}
_ENDS = {"completed": "response.completed", "incomplete": "response.incomplete", "failed": "response.failed"}


class Respond(Exchange):
    """One request: its answer as an object, or as events."""

    def __init__(
        self, request: ResponsesRequest, served: Served, store: Store, tenant: str, id: str | None = None
    ) -> None:  # fmt: skip
        """`id`: of an answer in the background, which is kept already."""
        items, own = items_of(request, store, tenant)
        super().__init__(ask_of(request, served, items))
        self._key: str = id.removeprefix("resp_") if id is not None else uuid4().hex
        self.id = f"resp_{self._key}"
        self.streamed = bool(request.stream)
        self._request, self._tokenizer, self._model = request, served.tokenizer, request.model or served.names[0]
        self._created = progress(store.get(tenant, id)).created_at if id is not None else int(time.time())
        self._store = store if request.store is not False else None
        self._background = bool(request.background)
        self._tenant, self._asked = tenant, _encode([kept_item(item) for item in own])
        self.headers = {"x-request-id": self.id, **warnings_header(request.dropped)}
        self._number = 0  # of the next event
        self._part = 0  # the part that grows
        self._sent = -1  # pieces of it that were told; -1: not even that it began
        self._head, self._tail = b"", b""  # of what tells them

    # -- whole

    def whole(self, turns: Sequence[Turn]) -> bytes:
        return self._ended(turns[0])

    def _ended(self, turn: Turn) -> bytes:
        """The answer, which is kept from now on."""
        message = turn.message
        assert message.finish is not None
        output = [self._item(message, i) for i in range(len(_parts(message)))]
        body = _encode(self._body(_status(message.finish), output, message.finish, turn.stream.usage))
        if self._store is not None and not self._background:
            self._store.put(self._tenant, Kept(self.id, self._request.previous_response_id, self._asked, body))
        return body

    def queued(self) -> Kept:
        """The answer before it is made."""
        body = _encode(self._body("queued", []))
        return Kept(self.id, self._request.previous_response_id, self._asked, body)

    def _body(
        self, status: str, output: list[Any], finish: Finish | None = None, usage: Usage | None = None
    ) -> dict[str, Any]:  # fmt: skip
        r, ask = self._request, self.ask
        assert isinstance(ask, ChatAsk)
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        choice = r.tool_choice.model_dump(exclude_none=True) if isinstance(r.tool_choice, NamedTool) else r.tool_choice
        form = r.text.format if r.text is not None else None
        return {
            "id": self.id, "object": "response", "created_at": self._created, "status": status, "model": self._model,
            "completed_at": int(time.time()) if status == "completed" else None, "background": self._background,
            "error": _error(finish.error if finish is not None else None), "incomplete_details": reason,
            "instructions": r.instructions, "max_output_tokens": r.max_output_tokens, "metadata": r.metadata or {},
            "output": output, "parallel_tool_calls": r.parallel_tool_calls is not False,
            "previous_response_id": r.previous_response_id, "store": self._store is not None,
            "reasoning": {"effort": r.reasoning.effort if r.reasoning is not None else None, "summary": None},
            "temperature": ask.params.temperature, "top_p": ask.params.top_p, "top_logprobs": r.top_logprobs or 0,
            "text": {"format": form.model_dump(exclude_none=True, by_alias=True) if form else {"type": "text"}},
            "tool_choice": choice or "auto", "tools": [_shown_tool(tool) for tool in r.tools or ()],
            "truncation": r.truncation or "disabled", **({"usage": _usage(usage)} if usage is not None else {}),
        }  # fmt: skip

    def _item(self, message: Message, index: int) -> dict[str, Any]:
        """The item of a part that grows no more."""
        parts = _parts(message)
        part, last = parts[index], index == len(parts) - 1
        cut = last and message.finish is not None and message.finish.reason in ("length", "error")
        item = self._begun(part, index, "incomplete" if cut else "completed")
        if part.kind == "call":
            item["arguments"] = part.text
        else:
            item["content"] = [_content(part, part.text, self._logprobs(message, index))]
        if part.kind == "reasoning" and self._request.sealed:
            item["encrypted_content"] = sealed(part.text)
        return item

    def _begun(self, part: Part, index: int, status: str) -> dict[str, Any]:
        """The item of a part without its text."""
        item = {"id": f"{_PREFIX[part.kind]}_{self._key}_{index}", "status": status}
        if part.kind == "call":
            return {**item, "type": "function_call", "call_id": part.id, "name": part.name, "arguments": ""}
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
            for kind in ("response.created", "response.in_progress"):
                out.append(self._event(kind, response=self._body("in_progress", [])))
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
        if finish is not None:
            body = msgspec.Raw(self._ended(turn))
            out.append(self._event(_ENDS[_status(finish)], response=body))
        return b"".join(out)

    def _begin(self, part: Part, out: list[bytes]) -> None:
        index = self._part
        item = self._begun(part, index, "in_progress")
        out.append(self._event("response.output_item.added", output_index=index, item=item))
        if part.kind != "call":
            out.append(self._place("response.content_part.added", item["id"], part=_content(part, "", [])))
        kind = f"response.{_DELTA[part.kind]}.delta"
        place = f'"item_id":"{item["id"]}","output_index":{index}' + (',"content_index":0' * (part.kind != "call"))
        self._head = f'event: {kind}\ndata: {{"type":"{kind}",{place},"delta":'.encode()
        self._sent = 0

    def _grow(self, part: Part, change: Change, out: list[bytes]) -> None:
        text = "".join(part.pieces[self._sent :])
        self._sent = len(part.pieces)
        more = b""
        if part.kind == "content":
            entries = change.logprobs if self._request.logprobs is not None else []
            shown = content_logprobs(entries, self._tokenizer, self._request.logprobs or 0)
            more = b',"logprobs":' + _encode(_short(shown)) if shown else b',"logprobs":[]'
        if text:
            out.append(b'%b%b%b,"sequence_number":%d}\n\n' % (self._head, _encode(text), more, self._number))
            self._number += 1

    def _end(self, message: Message, part: Part, out: list[bytes]) -> None:
        item = self._item(message, self._part)
        kind = f"response.{_DELTA[part.kind]}.done"
        if part.kind == "call":
            given = {"name": part.name, "arguments": part.text}
            out.append(self._event(kind, item_id=item["id"], output_index=self._part, **given))
        else:
            content = item["content"][0]
            shown = {"logprobs": _short(content["logprobs"])} if part.kind == "content" else {}
            out.append(self._place(kind, item["id"], text=part.text, **shown))
            out.append(self._place("response.content_part.done", item["id"], part=content))
        out.append(self._event("response.output_item.done", output_index=self._part, item=item))

    def _place(self, kind: str, id: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=id, output_index=self._part, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = _encode({"type": kind, **fields, "sequence_number": self._number})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


class Count(Exchange):
    """How many tokens the prompt of a conversation has: nothing is generated."""

    played = False

    def __init__(self, request: CountRequest, served: Served, store: Store, tenant: str) -> None:
        items, _ = items_of(request, store, tenant)
        super().__init__(_conversation(request, served, items))
        self.headers = warnings_header(request.dropped)

    def whole(self, turns: Sequence[Turn]) -> bytes:
        return _encode({"object": "response.input_tokens", "input_tokens": len(turns[0].request.token_ids)})


def ask_of(request: ResponsesRequest, served: Served, items: list[Placed]) -> ChatAsk:
    """Raises RequestError."""
    r = request
    ask = _conversation(r, served, items)
    given: dict[str, Any] = dict(served.default_params)
    given |= {k: v for k in ("temperature", "top_p", "top_k", "min_p", "seed") if (v := getattr(r, k)) is not None}
    # max_output_tokens is a ceiling in this API: an answer may be shorter where the context ends
    params = SamplingParams(max_tokens=None, logprobs=r.logprobs, grammar=r.grammar, **given)
    last = max(1, served.max_length - (r.max_output_tokens or 1)) if r.truncation == "auto" else None
    return replace(
        ask, params=params, default_tokens=r.max_output_tokens, grammar_field="text.format", last=last,
        priority=r.priority or 0, salt=r.cache_salt,
    )  # fmt: skip


def _conversation(request: CountRequest, served: Served, items: list[Placed]) -> ChatAsk:
    """What both routes make of a conversation. Raises RequestError."""
    r, reader = request, Reader(request.dropped)
    tools, choice = reader.tools(r)
    return ChatAsk(
        messages=reader.messages(r.instructions, items),
        tools=tools,
        tool_choice=choice,
        parallel_calls=r.parallel_tool_calls is not False,
        template_options=r.chat_template_kwargs or {},
        effort=r.reasoning.effort if r.reasoning is not None else None,
        adapter=served.adapter(r.model),
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


def _shown_tool(tool: Tool) -> dict[str, Any]:
    return {
        "type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }  # fmt: skip


def _status(finish: Finish) -> str:
    return {"length": "incomplete", "error": "failed"}.get(finish.reason, "completed")


def _error(error: ErrorInfo | None) -> dict[str, str] | None:
    return {"code": "server_error", "message": error.message} if error is not None else None


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
