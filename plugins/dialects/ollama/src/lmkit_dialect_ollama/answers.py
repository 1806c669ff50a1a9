"""How answers of the Ollama API are written: whole, or as lines of JSON.

The arguments of a call are an object in this API. So a call is told when the model has closed it, and what it wrote of
one that was cut is content.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from lmkit.api import PoolingParams, TokenLogprob
from lmkit_http.dialect import Change, ChatAsk, Exchange, Finish, PoolAsk, Served, TextAsk, ToolCall, Turn
from lmkit_http.messages import conversation, declared

from lmkit_dialect_ollama.schema import ChatRequest, EmbeddingsRequest, EmbedRequest, GenerateRequest, Generating

_encode = msgspec.json.Encoder().encode


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class _Text(Exchange):
    """What /api/chat and /api/generate share: `said` is where a piece of an answer stands in its object."""

    def __init__(self, request: Generating, served: Served, ask: ChatAsk | TextAsk) -> None:
        super().__init__(ask)
        self._began = time.monotonic()
        self._request, self._tokenizer = request, served.tokenizer
        self.streamed = request.stream is not False

    @abstractmethod
    def said(self, content: str, thinking: str, calls: Sequence[ToolCall]) -> dict[str, Any]: ...

    def whole(self, turns: Sequence[Turn]) -> bytes:
        (turn,) = turns
        message = turn.message
        assert message.finish is not None
        said = self._object(message.content, message.reasoning, message.calls, message.logprobs)
        return _encode({**said, **self._end(turn, message.finish)})

    def chunk(self, turn: Turn, change: Change) -> bytes:
        """A line for each change."""
        finish = change.finish
        calls = [ToolCall(call.id or "", call.name or "", call.arguments) for call in change.calls]
        thinking = "" if self._request.think is False else change.reasoning
        data = b""
        if change.content or thinking or calls or change.logprobs:
            said = self._object(change.content, thinking, calls, change.logprobs)
            data = _encode({**said, "done": False}) + b"\n"
        if finish is not None and finish.reason != "error":
            data += _encode({**self._object("", "", (), ()), **self._end(turn, finish)}) + b"\n"
        return data

    def explained(self, told: bytes) -> bytes:
        said = {**self._object("", "", (), ()), "done": True, "lmkit": msgspec.Raw(told)}
        return _encode(said) + b"\n"

    def _object(
        self, content: str, thinking: str, calls: Sequence[ToolCall], logprobs: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        thinking = "" if self._request.think is False else thinking
        said = {"model": self._request.model, "created_at": now(), **self.said(content, thinking, calls)}
        if logprobs and self._request.logprobs:
            said["logprobs"] = [self._logprob(entry) for entry in logprobs]
        return said

    def _logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in entry.top[: self._request.top_logprobs or 0]]
        return {**self._token(entry.token, entry.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._tokenizer.piece(token)
        return {"token": piece.decode(errors="replace"), "logprob": max(logprob, -9999.0), "bytes": list(piece)}

    def _end(self, turn: Turn, finish: Finish) -> dict[str, Any]:
        """Counts, and nanoseconds: the prompt's without the queue's, where the engine says what that was."""
        first, started = turn.first or turn.last, finish.usage.started
        prompt = first - turn.submitted if started is None else started.prefill
        return {
            "done": True, "done_reason": finish.reason,
            "total_duration": _nanoseconds(time.monotonic() - self._began), "load_duration": 0,
            "prompt_eval_count": finish.usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(prompt),
            "eval_count": finish.usage.completion_tokens, "eval_duration": _nanoseconds(turn.last - first),
        }  # fmt: skip


class Chat(_Text):
    id_kind = "chat"

    def __init__(self, request: ChatRequest, served: Served, adapter: str | None) -> None:
        said = request.messages or []
        messages = conversation([m.message(i) for i, m in enumerate(said)], served.words, request.dropped)
        goes_on = said[-1].role == "assistant" and bool(said[-1].content) and not said[-1].tool_calls
        ask = ChatAsk(
            messages=messages, tools=declared(request.tools or (), served.words, request.dropped),
            effort=request.effort(served), effort_field="think",
            params=request.params(served), adapter=adapter, grammar_field="format",
            dropped=request.dropped, continue_final=goes_on, add_generation_prompt=not goes_on,
            whole_calls=True,
        )  # fmt: skip
        super().__init__(request, served, ask)

    def said(self, content: str, thinking: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "function": {"name": call.name, "arguments": msgspec.Raw(call.arguments.encode())}}
                for call in calls
            ]
        return {"message": message}


class Generate(_Text):
    """A prompt is the one message of a conversation, unless it is raw or the model has no chat template."""

    id_kind = "gen"

    def __init__(self, request: GenerateRequest, served: Served, adapter: str | None) -> None:
        params, prompt = request.params(served), request.prompt or ""
        ask: ChatAsk | TextAsk
        if request.raw or not served.about["capabilities"]["chat"]:
            whole = f"{request.system}\n\n{prompt}" if request.system else prompt
            ask = TextAsk(
                prompts=[whole], params=params, adapter=adapter, grammar_field="format", dropped=request.dropped
            )
        else:
            system = [{"role": "system", "content": request.system}] if request.system else []
            ask = ChatAsk(
                messages=[*system, {"role": "user", "content": prompt}], effort=request.effort(served),
                effort_field="think", params=params, adapter=adapter, grammar_field="format", dropped=request.dropped,
            )  # fmt: skip
        super().__init__(request, served, ask)

    def said(self, content: str, thinking: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        return {"response": content, **({"thinking": thinking} if thinking else {})}


class Embed(Exchange):
    """Vectors of texts. `single`: the older route, which takes one text and says nothing but its vector."""

    id_kind = "embd"

    def __init__(self, request: EmbedRequest | EmbeddingsRequest, served: Served, adapter: str | None) -> None:
        self._began, self._request = time.monotonic(), request
        if isinstance(request, EmbedRequest):
            prompts = [request.input] if isinstance(request.input, str) else request.input
            cut, dimensions = request.truncate is not False, request.dimensions
        else:
            prompts, cut, dimensions = [request.prompt], True, None
        limit = served.max_length if cut else None
        super().__init__(
            PoolAsk(
                prompts=prompts,
                params=PoolingParams("embed", dimensions),
                limit=limit,
                adapter=adapter,
                prompt_field="input",
                dropped=request.dropped,
            )
        )

    def whole(self, turns: Sequence[Turn]) -> bytes:
        found = [turn.message.pooled for turn in turns]
        vectors = [memoryview(one.data).cast("f", one.shape).tolist() for one in found if one is not None]
        if isinstance(self._request, EmbeddingsRequest):
            return _encode({"embedding": vectors[0]})
        return _encode({
            "model": self._request.model, "embeddings": vectors,
            "total_duration": _nanoseconds(time.monotonic() - self._began), "load_duration": 0,
            "prompt_eval_count": sum(turn.stream.usage.prompt_tokens for turn in turns),
        })  # fmt: skip


def _nanoseconds(seconds: float) -> int:
    return max(0, int(seconds * 1e9))
