"""/v1/chat/completions: the request becomes a Generation, its events become a message or chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from lmkit.api import InvalidParam, Reasoning, SamplingParams, Text, ToolArgs, ToolDef, ToolStart
from lmkit.text.stream import Finish, Logprobs, OutputEvent
from msgspec import structs

from lmkit_http.access import Caller
from lmkit_http.errors import UnsupportedField
from lmkit_http.generate import Choice, Generation, GenerationFailed, expand, make_request, new_id
from lmkit_http.limits import TEMPLATE_SLACK, check_prompt, check_texts, strings
from lmkit_http.schema import ChatRequest
from lmkit_http.wire import ContentLogprob, UsageBody, chunk_frame, content_logprobs, prompt_logprobs, usage_of

if TYPE_CHECKING:
    from lmkit_http.app import Backend

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

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


class FinalChunkChoice(ChunkChoice, omit_defaults=False):
    stop_reason: str | int | None = None


class TokensChunkChoice(ChunkChoice):
    token_ids: list[int] = []


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
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: Any = msgspec.UNSET


class Chat:
    """One request: prepared (render, tokenize, limits), then answered whole or streamed."""

    def __init__(self, backend: Backend, request: ChatRequest, caller: Caller) -> None:
        self._backend, self._request, self._caller = backend, request, caller
        self._model = request.model or backend.model
        self._id = new_id("chatcmpl")
        self._created = int(time.time())
        self._top = request.top_logprobs or 0
        self.constrained_by = request.answer_field

    def prepare(self) -> Generation:
        """CPU work only; may run in a thread. Raises RequestError."""
        r, text = self._request, self._backend.text
        tools = r.tool_defs()
        shown = [t.model_dump(exclude_unset=True) for t in r.tools or ()] if tools else []
        if tools:
            self._check_tools()
        kwargs = self._template_kwargs()
        messages, documents = r.template_messages(), r.documents or ()
        check_texts(text.tokenizer, strings([messages, shown, kwargs, documents]), self._backend.facts, TEMPLATE_SLACK)
        prompt = text.render_chat(
            messages, shown, kwargs, r.add_generation_prompt is not False, bool(r.continue_final_message), documents
        )
        check_texts(text.tokenizer, [prompt], self._backend.facts)
        token_ids = text.encode_prompt(prompt, add_special=False)
        room = check_prompt(token_ids, self._backend.facts, r.max_completion_tokens or r.max_tokens)
        params = r.params(text.default_params or {}, room, self._top if r.logprobs else None)
        self.token_ids = token_ids
        tail = text.prompt_tail(prompt, r.final_text() if r.continue_final_message else "")
        params, constrained = self._constrained(params, tools, tail, kwargs)
        choices = []
        for i, p in enumerate(expand(params, r.n or 1)):
            if i > 0 and p.prompt_logprobs is not None:
                p = replace(p, prompt_logprobs=None)  # the same for all choices
            stream = text.output_stream(
                p, tail, tools,
                prompt_ids=token_ids,
                continued=bool(r.continue_final_message),
                include_stop=bool(r.include_stop_str_in_output),
                skip_special=r.skip_special_tokens is not False,
                single_call=r.parallel_tool_calls is False,
                constrained=constrained,
            )  # fmt: skip
            request = make_request(
                f"{self._id}-{i}", token_ids, p, priority=r.priority or 0, cache_salt=self._caller.salt(r.cache_salt),
                adapter=self._backend.adapter(r.model),
            )  # fmt: skip
            choices.append(Choice(i, request, stream))
        return Generation(self._backend.client, choices, self._backend.metrics, r.resume)

    def _template_kwargs(self) -> dict[str, Any]:
        """Variables of the template. An effort is one of them, or turns thinking on or off. Raises UnsupportedField."""
        r, text = self._request, self._backend.text
        kwargs = dict(r.chat_template_kwargs or {})
        if r.reasoning_effort is None:
            return kwargs
        options = text.renderer.options if text.renderer is not None else frozenset()
        if "reasoning_effort" in options:
            return {"reasoning_effort": r.reasoning_effort, **kwargs}
        named = getattr(text.reasoning_format, "switch", ())
        switch = next((s for s in (*named, "enable_thinking", "thinking") if s in options), None)
        if switch is None:
            raise UnsupportedField("reasoning_effort", "the chat template of this model knows no reasoning effort")
        if r.reasoning_effort not in EFFORTS:
            raise InvalidParam("reasoning_effort", r.reasoning_effort, f"one of {', '.join(EFFORTS)}")
        return {switch: r.reasoning_effort != "none", **kwargs}

    def _constrained(
        self, params: SamplingParams, tools: list[ToolDef], tail: str, kwargs: dict[str, Any]
    ) -> tuple[SamplingParams, bool]:
        """What TextSide.constrain makes of the request. Raises RequestError."""
        r, text = self._request, self._backend.text
        answer = r.answer_grammar()
        self.constrained_by = r.answer_field if answer is not None else "tools"
        if r.thinking_token_budget is not None and text.reasoning_format is None:
            raise UnsupportedField("thinking_token_budget", "no reasoning parser is chosen for this model")
        return text.constrain(
            replace(params, grammar=answer), tail, kwargs, tools, r.choice,
            parallel=r.parallel_tool_calls is not False, thinking_budget=r.thinking_token_budget,
        )  # fmt: skip

    def _check_tools(self) -> None:
        """Tools that the model would never see, or calls that nobody would read, are refused."""
        text = self._backend.text
        if text.renderer is not None and not text.renderer.takes_tools:
            raise UnsupportedField("tools", "the chat template of this model does not take tools", fix="leave them out")
        if text.tool_format is None:
            raise UnsupportedField(
                "tools", "no tool parser is chosen for this model", fix="start the server with --tool-parser NAME"
            )

    # -- whole

    async def whole(self, generation: Generation) -> bytes:
        collected: list[list[OutputEvent]] = [[] for _ in generation.choices]
        async with generation:
            async for choice, events in generation.events():
                collected[choice.index] += events
                raise_error(events, self.constrained_by)
        return await generation.shaped(self._whole, generation, collected)

    def _whole(self, generation: Generation, collected: list[list[OutputEvent]]) -> bytes:
        bodies = [self._choice(c, events) for c, events in zip(generation.choices, collected, strict=True)]
        usage = usage_of([c.stream.usage for c in generation.choices], len(bodies))
        body = ChatBody(self._id, "chat.completion", self._created, self._model, bodies, usage)
        if self._request.return_token_ids:
            body.prompt_token_ids = self.token_ids
        if self._request.prompt_logprobs is not None:
            body.prompt_logprobs = prompt_logprobs(
                generation.choices[0].stream.prompt_logprobs, self._backend.text.tokenizer
            )
        return _encode(body)

    def _choice(self, choice: Choice, events: list[OutputEvent]) -> ChoiceBody:
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[tuple[Call, list[str]]] = []
        logprobs: list[ContentLogprob] = []
        finish = None
        for e in events:
            if isinstance(e, Text):
                content.append(e.text)
            elif isinstance(e, Reasoning):
                reasoning.append(e.text)
            elif isinstance(e, ToolStart):
                calls.append((Call(e.id, CallFunction(e.name, "")), []))
            elif isinstance(e, ToolArgs):
                calls[e.index][1].append(e.json_fragment)
            elif isinstance(e, Logprobs):
                logprobs += content_logprobs(e.entries, self._backend.text.tokenizer, self._top)
            elif isinstance(e, Finish):
                finish = e
        assert finish is not None
        for call, parts in calls:
            call.function.arguments = "".join(parts)
        text = "".join(content)
        message = MessageBody("assistant", text if text or not (calls or reasoning) else None)
        if reasoning and self._request.include_reasoning is not False:
            message.reasoning_content = message.reasoning = "".join(reasoning)
        if calls:
            message.tool_calls = [call for call, _ in calls]
        return ChoiceBody(
            choice.index,
            message,
            LogprobsBody(logprobs) if self._request.logprobs else None,
            _reason(finish, bool(calls)),
            finish.stop,
            choice.stream.token_ids if self._request.return_token_ids else msgspec.UNSET,
        )

    # -- streamed

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        r = self._request
        with_usage = bool(r.stream_options and r.stream_options.include_usage)
        head, tail = chunk_frame(self._id, "chat.completion.chunk", self._created, self._model, with_usage)
        begun = [False] * len(generation.choices)
        called = [False] * len(generation.choices)
        async for choice, events in generation.events():
            i = choice.index
            out = []
            if not begun[i]:
                raise_error(events, self.constrained_by)
                begun[i] = True
                out.append(ChunkChoice(i, Delta(role="assistant", content="")))
            out += self._chunks(choice, events, called)
            if out:
                yield b"".join([head + _encode(c) + tail for c in out])
            raise_error(events, self.constrained_by)
        if with_usage:
            usage = usage_of([c.stream.usage for c in generation.choices], len(generation.choices))
            yield head + b'],"usage":' + _encode(usage) + b"}\n\n"

    def _chunks(self, choice: Choice, events: list[OutputEvent], called: list[bool]) -> list[ChunkChoice]:
        """One chunk per feed, and one of its own for the end."""
        delta = Delta()
        entries: list[ContentLogprob] = []
        out: list[ChunkChoice] = []
        filled = False
        for e in events:
            if isinstance(e, Text):
                delta.content, filled = (delta.content or "") + e.text, True
            elif isinstance(e, Reasoning):
                if self._request.include_reasoning is not False:
                    delta.reasoning_content = (delta.reasoning_content or "") + e.text
                    delta.reasoning, filled = delta.reasoning_content, True
            elif isinstance(e, ToolStart):
                called[choice.index] = filled = True
                call = CallDelta(e.index, FunctionDelta(e.name, ""), e.id, "function")
                delta.tool_calls = [*(delta.tool_calls or ()), call]
            elif isinstance(e, ToolArgs):
                filled = True
                _add_arguments(delta, e)
            elif isinstance(e, Logprobs):
                entries += content_logprobs(e.entries, self._backend.text.tokenizer, self._top)
            elif isinstance(e, Finish) and e.reason != "error":
                out.append(
                    FinalChunkChoice(choice.index, Delta(), _reason(e, called[choice.index]), stop_reason=e.stop)
                )
        if filled or entries:
            logprobs = LogprobsBody(entries) if entries else None
            out.insert(0, ChunkChoice(choice.index, delta, None, logprobs))
        return out


def _add_arguments(delta: Delta, event: ToolArgs) -> None:
    """Joins the fragment to the call that it belongs to, if this chunk has it already."""
    calls = delta.tool_calls = delta.tool_calls or []
    if not calls or calls[-1].index != event.index:
        calls.append(CallDelta(event.index, FunctionDelta(arguments="")))
    function = calls[-1].function
    function.arguments = (function.arguments or "") + event.json_fragment


def _reason(finish: Finish, called: bool) -> str:
    return "tool_calls" if called and finish.reason == "stop" else finish.reason


def raise_error(events: list[OutputEvent], constrained_by: str) -> None:
    """Raises GenerationFailed when the last event is an error. `constrained_by`: the field that a grammar came from."""
    last = events[-1] if events else None
    if isinstance(last, Finish) and last.error is not None:
        error = last.error
        raise GenerationFailed(structs.replace(error, field=constrained_by) if error.field == "grammar" else error)
