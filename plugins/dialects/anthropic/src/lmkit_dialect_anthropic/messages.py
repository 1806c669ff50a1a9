"""/v1/messages: a body becomes the ask of a conversation, its message blocks, whole or as events.

The input of a tool_use block is an object, and Anthropic's own client completes JSON that is cut. So a call is told
when the model has closed it, and what it wrote of one that was cut is text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal
from uuid import uuid4

import msgspec
from lmkit.api import Grammar, SamplingParams, ToolChoice
from lmkit_formats import closed
from lmkit_http.dialect import (
    CallChange,
    Change,
    ChatAsk,
    Exchange,
    Finish,
    Part,
    Served,
    ToolCall,
    Turn,
    UnsupportedField,
    Usage,
)

from lmkit_dialect_anthropic.conversation import Reader
from lmkit_dialect_anthropic.schema import CountRequest, MessagesRequest

_encode = msgspec.json.encode
_MODES: dict[str, Literal["auto", "none", "required", "named"]] = {
    "auto": "auto", "any": "required", "tool": "named", "none": "none",
}  # fmt: skip
SIGNATURE = "unsigned"  # clients want one beside reasoning, and send it back; nothing here checks it


class Messages(Exchange):
    """One request: its answer as a message, or as events."""

    id_kind = "msg"

    def __init__(self, request: MessagesRequest, served: Served) -> None:
        reader = Reader(served.words, request.dropped)
        super().__init__(ask_of(request, served, reader))
        self._model = request.model or served.names[0]
        self.streamed = bool(request.stream)
        self._thinks = request.thinks  # else reasoning is not shown
        self.id = f"msg_{uuid4().hex}"  # clients tell ids by how they begin
        self.headers = {"request-id": self.id}
        self._block: str | int | None = None  # the open one: "thinking", "text", or the number of a call
        self._num_blocks = 0
        self._begun = False

    # -- whole

    def whole(self, turns: Sequence[Turn]) -> bytes:
        message = turns[0].message
        blocks = [_block(part) for part in message.parts if part.kind != "reasoning" or self._thinks]
        assert message.finish is not None
        body = self._message(blocks, turns[0].stream.usage, _reason(message.finish, message.calls))
        return _encode(body)

    def _message(
        self, content: list[dict[str, Any]], usage: Usage, ended: Mapping[str, str | None]
    ) -> dict[str, Any]:  # fmt: skip
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self._model, "content": content,
            **ended, "usage": _usage(usage),
        }  # fmt: skip

    # -- streamed

    def chunk(self, turn: Turn, change: Change) -> bytes:
        """Blocks follow one another: what belongs to another one ends the open one."""
        out: list[bytes] = []
        if not self._begun:
            self._begun = True
            started = self._message([], turn.stream.usage, {"stop_reason": None, "stop_sequence": None})
            out += [_event("message_start", message=started), _event("ping")]
        if change.reasoning and not self._thinks:
            self._close(out)  # what is said after it is another run
        elif change.reasoning:
            self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""}, out)
            out.append(self._delta("thinking_delta", "thinking", change.reasoning))
        if change.content:
            self._open("text", {"type": "text", "text": ""}, out)
            out.append(self._delta("text_delta", "text", change.content))
        for call in change.calls:
            self._call(call, out)
        if change.finish is not None and change.finish.reason != "error":
            self._close(out)
            ended = _reason(change.finish, turn.message.calls)
            out += [
                _event("message_delta", delta=ended, usage=_usage(turn.stream.usage)),
                _event("message_stop"),
            ]
        return b"".join(out)

    def _call(self, call: CallChange, out: list[bytes]) -> None:
        if call.id is not None:
            self._open(call.index, {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}, out)
        if call.arguments:
            out.append(self._delta("input_json_delta", "partial_json", call.arguments))

    def _open(self, block: str | int, content: dict[str, Any], out: list[bytes]) -> None:
        if self._block != block:
            self._close(out)
            self._block = block
            out.append(_event("content_block_start", index=self._num_blocks, content_block=content))

    def _close(self, out: list[bytes]) -> None:
        if self._block is None:
            return
        if self._block == "thinking":
            out.append(self._delta("signature_delta", "signature", SIGNATURE))
        out.append(_event("content_block_stop", index=self._num_blocks))
        self._block = None
        self._num_blocks += 1

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,' % self._num_blocks
        return head + b'"delta":{"type":"%b","%b":%b}}\n\n' % (kind.encode(), name.encode(), _encode(text))


class Count(Exchange):
    """How many tokens the prompt of a conversation has: nothing is generated."""

    played = False

    def __init__(self, request: CountRequest, served: Served) -> None:
        super().__init__(_conversation(request, served, Reader(served.words, request.dropped)))

    def whole(self, turns: Sequence[Turn]) -> bytes:
        return _encode({"input_tokens": len(turns[0].request.token_ids)})


def ask_of(request: MessagesRequest, served: Served, reader: Reader) -> ChatAsk:
    """Raises RequestError."""
    r = request
    ask = _conversation(r, served, reader)
    given: dict[str, Any] = dict(served.default_params)
    given |= {k: v for k in ("temperature", "top_p", "top_k", "stop_in") if (v := getattr(r, k)) is not None}
    if r.stop_sequences:
        given["stop"] = tuple(r.stop_sequences)
    grammar = None
    if r.format is not None:
        grammar = Grammar("json_schema", json.dumps(closed(r.format.schema_), ensure_ascii=False))
    # max_tokens is a ceiling in this API: an answer may be shorter where the context ends
    return replace(
        ask, params=SamplingParams(max_tokens=None, grammar=grammar, **given), default_tokens=r.max_tokens,
        grammar_field="output_config.format",
    )  # fmt: skip


def _conversation(request: CountRequest, served: Served, reader: Reader) -> ChatAsk:
    """What both routes make of a conversation. Raises RequestError."""
    r, can = request, served.about.get("capabilities", {})
    messages = reader.messages(r)
    choice = r.tool_choice
    if choice is not None and choice.type == "tool" and choice.name is None:
        raise UnsupportedField("tool_choice.name", "tool_choice of type 'tool' names the tool")
    mode = "auto" if choice is None else _MODES[choice.type]
    options, budget = _thinking(r, can, reader.dropped)
    effort = r.output_config.effort if r.output_config is not None else None
    if effort is not None and "reasoning_effort" not in can.get("template_options", ()):
        reader.dropped.add("output_config.effort")
        effort = None
    tools = reader.tools(r.tools or (), required=mode == "required")
    return ChatAsk(
        messages=messages,
        places=reader.places,
        tools=tools,
        tool_choice=ToolChoice(mode, choice.name if choice else None),
        parallel_calls=not (choice and choice.disable_parallel_tool_use),
        whole_calls=True,
        template_options=options,
        effort=effort,
        continue_final=messages[-1]["role"] == "assistant",
        add_generation_prompt=messages[-1]["role"] != "assistant",
        thinking_budget=budget,
        adapter=served.adapter(r.model),
        prompt_field="messages",
        dropped=reader.dropped,
    )


def _thinking(request: CountRequest, can: Mapping[str, Any], dropped: set[str]) -> tuple[dict[str, Any], int | None]:
    """Options of the template, and the budget. Models think when they are told to, where they can be told."""
    options = {"enable_thinking": request.thinks} if "enable_thinking" in can.get("template_options", ()) else {}
    if request.thinks and not can.get("reasoning"):
        dropped.add("thinking")
        return {}, None
    return options, request.thinking.budget_tokens if request.thinks and request.thinking is not None else None


def _block(part: Part) -> dict[str, Any]:
    """A run of a message as the block that its stream amounts to."""
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": SIGNATURE}
    if part.kind == "content":
        return {"type": "text", "text": part.text}
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": _input(part.text)}


def _input(arguments: str) -> Any:
    """An object, as the model's text says; a text that says none is shown as it is."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}


def _usage(usage: Usage) -> dict[str, int]:
    """Tokens that were found in the cache are counted apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _reason(finish: Finish, calls: Sequence[ToolCall]) -> dict[str, str | None]:
    """Clients execute the calls of an answer that ends with tool_use: then none was cut."""
    if finish.reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(finish.stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop}
    return {"stop_reason": "tool_use" if calls and not finish.cut_call else "end_turn", "stop_sequence": None}


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))
