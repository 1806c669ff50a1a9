"""/v1/chat/completions: a body becomes the ask of a conversation, its messages a body or chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec
from lmkit.api import TokenLogprob
from lmkit_http.dialect import CallChange, Change, ChatAsk, Exchange, Finish, Served, Turn
from lmkit_http.logprobs import ContentLogprob, content_logprobs
from lmkit_http.messages import conversation, declared

from lmkit_dialect_openai.schema import ChatRequest
from lmkit_dialect_openai.wire import (
    NewIds,
    UsageBody,
    answer_headers,
    chunk_frame,
    fingerprint,
    prompt_logprobs,
    usage_of,
)

_encode = msgspec.json.Encoder().encode


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class CallDelta(msgspec.Struct, omit_defaults=True):
    index: int
    function: FunctionDelta
    id: str | None = None
    type: str | None = None


class Delta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallDelta] | None = None


class LogprobsBody(msgspec.Struct):
    content: list[ContentLogprob]
    refusal: None = None


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: LogprobsBody | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class FinalChunkChoice(ChunkChoice, omit_defaults=False):
    stop_reason: str | int | None = None


class CallFunction(msgspec.Struct):
    name: str
    arguments: str


class Call(msgspec.Struct):
    id: str
    function: CallFunction
    type: Literal["function"] = "function"


class MessageBody(msgspec.Struct):
    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET
    reasoning: str | msgspec.UnsetType | None = msgspec.UNSET
    tool_calls: list[Call] | msgspec.UnsetType = msgspec.UNSET


class ChoiceBody(msgspec.Struct):
    index: int
    message: MessageBody
    logprobs: LogprobsBody | None
    finish_reason: str
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatBody(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChoiceBody]
    usage: UsageBody
    system_fingerprint: str
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: Any = msgspec.UNSET


class Chat(Exchange):
    """One request: its answer as a body, or as chunks."""

    id_kind = "chatcmpl"

    def __init__(self, request: ChatRequest, served: Served) -> None:
        super().__init__(ask_of(request, served))
        self._request, self._tokenizer = request, served.tokenizer
        self._model = request.model or served.names[0]
        self._created, self._fingerprint = int(time.time()), fingerprint(served)
        self._top = request.top_logprobs or 0
        self.streamed = bool(request.stream)
        options = request.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._each_usage = bool(self._with_usage and options and options.continuous_usage_stats)
        self._by_id = bool(request.return_tokens_as_token_ids)
        self._head, self._tail = chunk_frame(
            self.id, "chat.completion.chunk", self._created, self._model, self._fingerprint, self._with_usage
        )
        self.headers = answer_headers(request, self.id)
        self._begun = [False] * (request.n or 1)
        self._ids = NewIds(request.return_token_ids)

    # -- whole

    def whole(self, turns: Sequence[Turn]) -> bytes:
        bodies = [self._choice(turn) for turn in turns]
        usage = usage_of([turn.stream.usage for turn in turns], len(bodies))
        body = ChatBody(self.id, "chat.completion", self._created, self._model, bodies, usage, self._fingerprint)
        if self._request.return_token_ids:
            body.prompt_token_ids = turns[0].request.token_ids
        if self._request.prompt_logprobs is not None:
            body.prompt_logprobs = prompt_logprobs(turns[0].stream.prompt_logprobs, self._tokenizer)
        return _encode(body)

    def _choice(self, turn: Turn) -> ChoiceBody:
        message, calls, reasoning = turn.message, turn.message.calls, turn.message.reasoning
        finish, text = message.finish, turn.message.content
        assert finish is not None
        body = MessageBody("assistant", text if text or not (calls or reasoning) else None)
        if reasoning and self._request.shows_reasoning:
            body.reasoning_content = body.reasoning = reasoning
        if calls:
            body.tool_calls = [Call(call.id, CallFunction(call.name, call.arguments)) for call in calls]
        logprobs = self._logprobs(message.logprobs) if self._request.logprobs else None
        return ChoiceBody(
            turn.index,
            body,
            LogprobsBody(logprobs) if logprobs is not None else None,
            _reason(finish, bool(calls)),
            finish.stop,
            turn.stream.token_ids if self._request.return_token_ids else msgspec.UNSET,
        )

    def _logprobs(self, entries: list[TokenLogprob]) -> list[ContentLogprob]:
        return content_logprobs(entries, self._tokenizer, self._top, self._by_id)

    # -- streamed

    def chunk(self, turn: Turn, change: Change) -> bytes:
        """One chunk per change, and chunks of their own for the beginning and the end."""
        index, head, tail = turn.index, self._head, self._tail
        if self._each_usage:
            tail = b'],"usage":' + _encode(usage_of([turn.stream.usage])) + b"}\n\n"
        data = b""
        if not self._begun[index]:
            prompt = b""
            if self._request.return_token_ids and not any(self._begun):
                prompt = b'],"prompt_token_ids":' + _encode(turn.request.token_ids)
            self._begun[index] = True
            beginning = ChunkChoice(index, Delta(role="assistant", content=""))
            data = head + _encode(beginning) + (prompt + tail[1:] if prompt else tail)
        delta, filled = self._delta(change)
        entries = self._logprobs(change.logprobs) if change.logprobs else None
        if filled or entries:
            logprobs = LogprobsBody(entries) if entries else None
            data += head + _encode(ChunkChoice(index, delta, None, logprobs, self._ids.take(turn))) + tail
        finish = change.finish
        if finish is not None and finish.reason != "error":
            reason = _reason(finish, bool(turn.message.calls))
            last = FinalChunkChoice(index, Delta(), reason, None, self._ids.take(turn), finish.stop)
            data += head + _encode(last) + tail
        return data

    def _delta(self, change: Change) -> tuple[Delta, bool]:
        """What is shown of a change, and whether it is anything."""
        delta, filled = Delta(), False
        if change.content:
            delta.content, filled = change.content, True
        if change.reasoning and self._request.shows_reasoning:
            delta.reasoning_content = delta.reasoning = change.reasoning
            filled = True
        if calls := [_call(call) for call in change.calls if call.arguments]:
            delta.tool_calls, filled = calls, True
        return delta, filled

    def explained(self, told: bytes) -> bytes:
        return self._head + b'],"lmkit":' + told + b"}\n\n"

    def end(self, turns: Sequence[Turn]) -> bytes:
        if not self._with_usage:
            return b""
        usage = usage_of([turn.stream.usage for turn in turns], len(turns))
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n"


def ask_of(request: ChatRequest, served: Served) -> ChatAsk:
    """Raises RequestError."""
    r = request
    max_tokens = r.max_completion_tokens or r.max_tokens
    params = r.params(served, max_tokens, (r.top_logprobs or 0) if r.logprobs else None)
    messages = conversation(r.messages, served.words, r.dropped)
    # as other servers let the last message say by itself that it is the beginning of the answer
    goes_on = bool(r.continue_final_message or (r.messages[-1].model_extra or {}).get("prefix") is True)
    return ChatAsk(
        messages=messages,
        tools=declared(r.tools or (), served.words, r.dropped, r.choice),
        tool_choice=r.choice,
        parallel_calls=r.parallel_tool_calls is not False,
        template_options=r.chat_template_kwargs or {},
        effort=r.effort,
        documents=r.documents or (),
        add_generation_prompt=r.add_generation_prompt is not False,
        continue_final=goes_on,
        thinking_budget=r.reasoning_budget,
        params=replace(params, grammar=r.answer_grammar()),
        n=r.n or 1,
        beams=r.beams(r.n or 1),
        adapter=served.adapter(r.model),
        prompt_field="messages",
        dropped=r.dropped,
        priority=r.priority or 0,
        salt=r.cache_salt,
        resume=r.resume,
        include_stop=r.includes_stop,
        skip_special=r.skip_special_tokens is not False,
        grammar_field=r.answer_field,
        last=r.last(served, max_tokens),
    )


def _call(change: CallChange) -> CallDelta:
    if change.id is None:
        return CallDelta(change.index, FunctionDelta(arguments=change.arguments))
    return CallDelta(change.index, FunctionDelta(change.name, change.arguments), change.id, "function")


def _reason(finish: Finish, called: bool) -> str:
    """A client may execute the calls of an answer that ends with "tool_calls": then none of them was cut."""
    return "tool_calls" if called and finish.reason == "stop" and not finish.cut_call else finish.reason
