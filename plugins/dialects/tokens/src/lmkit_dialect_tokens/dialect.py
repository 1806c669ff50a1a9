"""Token ids in, token ids out; and prompts of chats and completions as the token ids that they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from lmkit_dialect_openai.chat import Chat
from lmkit_dialect_openai.completions import Completions
from lmkit_dialect_openai.schema import ChatRequest, CompletionRequest, Sampling
from lmkit_dialect_openai.wire import UsageBody, prompt_logprobs, usage_of
from lmkit_http.dialect import Change, Dialect, Exchange, Incoming, Served, TextAsk, Turn, UnsupportedField
from lmkit_http.logprobs import ContentLogprob, content_logprobs
from lmkit_http.strict import parse

from lmkit_dialect_tokens.schema import GenerateRequest, sampling_params

_encode = msgspec.json.Encoder().encode
GENERATE = "POST /inference/v1/generate"
REQUESTS = {GENERATE: GenerateRequest}
CHAT, COMPLETIONS = "POST /v1/chat/completions/render", "POST /v1/completions/render"


class LogprobsBody(msgspec.Struct):
    content: list[ContentLogprob]


class ChoiceBody(msgspec.Struct):
    index: int
    token_ids: list[int]
    logprobs: LogprobsBody | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class GenerateBody(msgspec.Struct, omit_defaults=True):
    request_id: str
    choices: list[ChoiceBody]
    usage: UsageBody | None = None
    prompt_logprobs: Any = None


class Generate(Exchange):
    id_kind = "gen"

    def __init__(self, request: GenerateRequest, served: Served) -> None:
        params = request.sampling_params
        super().__init__(ask_of(request, served))
        self._request, self._tokenizer = request, served.tokenizer
        self._top = params.logprobs
        self._shown = request.request_id or self.id
        self.streamed = bool(request.stream)
        options = request.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._each_usage = bool(self._with_usage and options and options.continuous_usage_stats)
        self._num_sent = [0] * (params.n or 1)
        shown = self._shown if self._shown.isascii() and self._shown.isprintable() else self.id
        self.headers = {"x-request-id": shown}

    def whole(self, turns: Sequence[Turn]) -> bytes:
        usage = usage_of([turn.stream.usage for turn in turns], len(turns))
        body = GenerateBody(self._shown, [self._choice(turn) for turn in turns], usage)
        if self._request.sampling_params.prompt_logprobs is not None:
            body.prompt_logprobs = prompt_logprobs(turns[0].stream.prompt_logprobs, self._tokenizer)
        return _encode(body)

    def _choice(self, turn: Turn, start: int = 0) -> ChoiceBody:
        """The tokens from `start` on."""
        stream, finish = turn.stream, turn.message.finish
        body = ChoiceBody(turn.index, stream.token_ids[start:])
        if self._top is not None:
            body.logprobs = LogprobsBody(content_logprobs(stream.logprobs[start:], self._tokenizer, self._top))
        if finish is not None:
            body.finish_reason, body.stop_reason = finish.reason, finish.stop
        return body

    def chunk(self, turn: Turn, change: Change) -> bytes:
        """The tokens since the last chunk: those that have no text yet come with the next."""
        if change.finish is not None and change.finish.reason == "error":
            return b""
        start, self._num_sent[turn.index] = self._num_sent[turn.index], len(turn.stream.token_ids)
        usage = usage_of([turn.stream.usage]) if self._each_usage else None
        return b"data: " + _encode(GenerateBody(self._shown, [self._choice(turn, start)], usage)) + b"\n\n"

    def end(self, turns: Sequence[Turn]) -> bytes:
        if not self._with_usage:
            return b""
        usage = usage_of([turn.stream.usage for turn in turns], len(turns))
        return b"data: " + _encode(GenerateBody(self._shown, [], usage)) + b"\n\n"


def ask_of(request: GenerateRequest, served: Served) -> TextAsk:
    """Raises RequestError."""
    r = request.sampling_params
    params = replace(r.params(served, r.max_tokens, r.logprobs), grammar=r.answer_grammar())
    return TextAsk(
        prompts=[request.token_ids],
        params=params,
        n=r.n or 1,
        adapter=served.adapter(request.model),
        prompt_field="token_ids",
        dropped=request.dropped,
        priority=request.priority or 0,
        salt=request.cache_salt,
        include_stop=r.includes_stop,
        skip_special=r.skip_special_tokens is not False,
        grammar_field="sampling_params.structured_outputs",
    )


class RenderedChat(Chat):
    """A chat that is not played: the body for /inference/v1/generate which asks the same."""

    played = False

    def __init__(self, request: ChatRequest, served: Served) -> None:
        if request.reasoning_budget is not None:
            raise UnsupportedField("thinking_token_budget", "token ids cannot say how long the model may think")
        super().__init__(request, served)
        self._rendered, self._streaming = sampling_params(request), _streaming(request)

    def whole(self, turns: Sequence[Turn]) -> bytes:
        return _encode(_rendered(self, turns[0], self._rendered, self._model, self._streaming))


class RenderedCompletions(Completions):
    """The same for each prompt, in a list."""

    played = False

    def __init__(self, request: CompletionRequest, served: Served) -> None:
        self._n = request.n or 1
        if request.num_answers > self._n:
            raise UnsupportedField("best_of", "token ids cannot say which answers are the best", fix="send n")
        super().__init__(request, served)
        self._rendered, self._streaming = sampling_params(request), _streaming(request)

    def whole(self, turns: Sequence[Turn]) -> bytes:
        return _encode(
            [_rendered(self, turn, self._rendered, self._model, self._streaming) for turn in turns[:: self._n]]
        )


def _rendered(
    exchange: Exchange, turn: Turn, params: dict[str, Any], model: str, streaming: dict[str, Any]
) -> dict[str, Any]:
    """Raises UnsupportedField for what token ids and sampling parameters alone cannot say."""
    if turn.request.params.grammar is not None:
        raise UnsupportedField(
            turn.constrained_by, f"{turn.constrained_by} constrain the answer, which a rendered prompt cannot say",
            fix="send the constraint with the token ids, as sampling_params.structured_outputs",
        )  # fmt: skip
    return {
        "request_id": f"{exchange.id}-{turn.index}", "model": model, "token_ids": turn.request.token_ids,
        "sampling_params": {**params, "max_tokens": turn.request.params.max_tokens},
        "priority": exchange.ask.priority, "cache_salt": exchange.ask.salt, **streaming,
    }  # fmt: skip


def _streaming(request: Sampling) -> dict[str, Any]:
    """The stream options of a request, for the rendered one, which is streamed where it is sent."""
    return request.model_dump(include={"stream", "stream_options"}, exclude_none=True) if request.stream else {}


class Tokens(Dialect):
    keeps = False
    routes = (GENERATE, CHAT, COMPLETIONS)
    stream_end = b"data: [DONE]\n\n"

    def parse(self, incoming: Incoming, served: Served) -> Exchange:
        if incoming.route == GENERATE:
            request = parse(REQUESTS[GENERATE], incoming.body, served.max_values, served.lenient)
            request.model = request.model or None
            served.check_model(request.model)
            request.check()
            return Generate(request, served)
        if incoming.route == CHAT:
            return RenderedChat(_unplayed(ChatRequest, incoming, served), served)
        return RenderedCompletions(_unplayed(CompletionRequest, incoming, served), served)


def _unplayed(kind: Any, incoming: Incoming, served: Served) -> Any:
    """The request, of a kind of Sampling. Raises RequestError."""
    request: Sampling = parse(kind, incoming.body, served.max_values, served.lenient)
    request.model = request.model or None
    served.check_model(request.model)
    request.check()
    return request
