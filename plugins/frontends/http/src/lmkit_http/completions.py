"""/v1/completions: prompts as text or token ids, several at once, with echo and logprobs."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec
from lmkit.api import Text, TokenLogprob
from lmkit.text.stream import Finish, Logprobs, OutputEvent

from lmkit_http.access import Caller
from lmkit_http.chat import raise_error
from lmkit_http.errors import UnsupportedField
from lmkit_http.generate import Choice, Generation, expand, make_request, new_id
from lmkit_http.limits import check_prompt, check_texts
from lmkit_http.schema import CompletionRequest
from lmkit_http.wire import UsageBody, chunk_frame, finite, prompt_logprobs, usage_of

if TYPE_CHECKING:
    from lmkit_http.app import Backend

_encode = msgspec.json.Encoder().encode
_DEFAULT_TOKENS = 16  # of the OpenAI API


class LogprobsBody(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class ChoiceBody(msgspec.Struct):
    index: int
    text: str
    logprobs: LogprobsBody | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: Any = msgspec.UNSET


class CompletionBody(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChoiceBody]
    usage: UsageBody


class Completions:
    """One request with one or more prompts; choice i of prompt p has index p * n + i."""

    def __init__(self, backend: Backend, request: CompletionRequest, caller: Caller) -> None:
        self._backend, self._request, self._caller = backend, request, caller
        self._model = request.model or backend.model
        self._id = new_id("cmpl")
        self._created = int(time.time())
        self._n = request.n or 1
        self._prompts: list[tuple[str, list[int]]] = []

    def prepare(self) -> Generation:
        """CPU work only; may run in a thread. Raises RequestError."""
        r, text, facts = self._request, self._backend.text, self._backend.facts
        prompts = r.prompts()
        if len(prompts) * self._n > self._backend.settings.max_choices:
            raise UnsupportedField(
                "n", f"{len(prompts)} prompts x n={self._n} are more than {self._backend.settings.max_choices} choices"
            )
        echo_only = r.max_tokens == 0
        if echo_only and not r.echo:
            raise UnsupportedField("max_tokens", "max_tokens=0 is only allowed with echo=true")
        choices: list[Choice] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                check_texts(text.tokenizer, [prompt], facts)
                token_ids = text.encode_prompt(prompt, add_special=r.add_special_tokens is not False)
            else:
                token_ids = prompt
            wanted = 1 if echo_only else r.max_tokens
            room = check_prompt(token_ids, facts, wanted, _DEFAULT_TOKENS)
            shown = prompt if isinstance(prompt, str) else text.decode_all(token_ids)
            self._prompts.append((shown, token_ids))
            params = replace(r.params(text.default_params or {}, room, r.logprobs), grammar=r.answer_grammar())
            if r.echo and r.logprobs is not None and params.prompt_logprobs is None:
                params = replace(params, prompt_logprobs=r.logprobs)
            for p in expand(params, self._n):
                index = len(choices)
                stream = text.output_stream(
                    p, parse=False, prompt_ids=token_ids,
                    include_stop=bool(r.include_stop_str_in_output), skip_special=r.skip_special_tokens is not False,
                )  # fmt: skip
                request = make_request(
                    f"{self._id}-{index}", token_ids, p, priority=r.priority or 0,
                    cache_salt=self._caller.salt(r.cache_salt), adapter=self._backend.adapter(r.model),
                )  # fmt: skip
                choices.append(Choice(index, request, stream))
        return Generation(self._backend.client, choices, self._backend.metrics, r.resume)

    # -- whole

    async def whole(self, generation: Generation) -> bytes:
        collected: list[list[OutputEvent]] = [[] for _ in generation.choices]
        async with generation:
            async for choice, events in generation.events():
                collected[choice.index] += events
                raise_error(events, self._request.answer_field)
        return await generation.shaped(self._whole, generation, collected)

    def _whole(self, generation: Generation, collected: list[list[OutputEvent]]) -> bytes:
        bodies = [self._choice(c, events) for c, events in zip(generation.choices, collected, strict=True)]
        return _encode(
            CompletionBody(self._id, "text_completion", self._created, self._model, bodies, self._usage(generation))
        )

    def _usage(self, generation: Generation) -> UsageBody:
        usages = [c.stream.usage for c in generation.choices]
        if self._request.max_tokens == 0:
            for usage in usages:
                usage.completion_tokens = 0
        return usage_of(usages, self._n)

    def _choice(self, choice: Choice, events: list[OutputEvent]) -> ChoiceBody:
        r = self._request
        prompt, prompt_ids = self._prompts[choice.index // self._n]
        finish = events[-1]
        assert isinstance(finish, Finish)
        text = "".join(e.text for e in events if isinstance(e, Text))
        logprobs = None
        if r.logprobs is not None:
            logprobs = LogprobsBody([], [], [], [])
            for e in events:
                if isinstance(e, Logprobs):
                    self._add(logprobs, e.entries, e.offsets)
        token_ids = choice.stream.token_ids
        if r.max_tokens == 0:
            text, token_ids, logprobs = "", [], logprobs and LogprobsBody([], [], [], [])
        if r.echo:
            text = prompt + text
            if logprobs is not None:
                logprobs = self._echo(logprobs, prompt, prompt_ids, choice.stream.prompt_logprobs)
        body = ChoiceBody(choice.index, text, logprobs, "length" if r.max_tokens == 0 else finish.reason, finish.stop)
        if r.return_token_ids:
            body.token_ids, body.prompt_token_ids = token_ids, prompt_ids
        if r.prompt_logprobs is not None:
            body.prompt_logprobs = prompt_logprobs(choice.stream.prompt_logprobs, self._backend.text.tokenizer)
        return body

    def _add(self, body: LogprobsBody, entries: list[TokenLogprob], offsets: list[int], shift: int = 0) -> None:
        piece, num_top = self._backend.text.tokenizer.piece, self._request.logprobs or 0
        for e, at in zip(entries, offsets, strict=True):
            token = piece(e.token).decode(errors="replace")
            body.tokens.append(token)
            body.token_logprobs.append(finite(e.logprob))
            body.text_offset.append(shift + at)
            top = {piece(t).decode(errors="replace"): finite(p) for t, p in reversed(e.top[:num_top])}
            body.top_logprobs.append(dict(reversed(top.items())) | {token: finite(e.logprob)})

    def _echo(
        self, output: LogprobsBody, prompt: str, prompt_ids: list[int], entries: list[TokenLogprob]
    ) -> LogprobsBody:
        """The prompt's tokens in front; the first has no logprob. Offsets follow the pieces."""
        body = LogprobsBody([], [], [], [])
        pieces = [self._backend.text.tokenizer.piece(t) for t in prompt_ids]
        body.tokens.append(pieces[0].decode(errors="replace"))
        body.token_logprobs.append(None)
        body.text_offset.append(0)
        body.top_logprobs.append(None)
        ends = list(accumulate(map(len, pieces[:-1])))
        self._add(body, entries[: len(ends)], _char_offsets(b"".join(pieces), ends)[: len(entries)])
        shift = len(prompt)
        body.tokens += output.tokens
        body.token_logprobs += output.token_logprobs
        body.text_offset += [shift + at for at in output.text_offset]
        body.top_logprobs += output.top_logprobs
        return body

    # -- streamed

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        r = self._request
        with_usage = bool(r.stream_options and r.stream_options.include_usage)
        head, tail = chunk_frame(self._id, "text_completion", self._created, self._model, with_usage)
        begun = [False] * len(generation.choices)
        async for choice, events in generation.events():
            out = []
            if not begun[choice.index]:
                raise_error(events, self._request.answer_field)
                begun[choice.index] = True
                if r.echo:
                    out.append(self._echo_chunk(choice))
            out += self._chunks(choice, events)
            if out:
                yield b"".join([head + _encode(c) + tail for c in out])
            raise_error(events, self._request.answer_field)
        if with_usage:
            yield head + b'],"usage":' + _encode(self._usage(generation)) + b"}\n\n"

    def _echo_chunk(self, choice: Choice) -> ChoiceBody:
        prompt, prompt_ids = self._prompts[choice.index // self._n]
        logprobs = None
        if self._request.logprobs is not None:
            logprobs = self._echo(LogprobsBody([], [], [], []), prompt, prompt_ids, choice.stream.prompt_logprobs)
        return ChoiceBody(choice.index, prompt, logprobs, None)

    def _chunks(self, choice: Choice, events: list[OutputEvent]) -> list[ChoiceBody]:
        r = self._request
        text, logprobs, out = "", None, []
        for e in events:
            if isinstance(e, Text):
                text += e.text
            elif isinstance(e, Logprobs) and r.logprobs is not None:
                logprobs = logprobs or LogprobsBody([], [], [], [])
                shift = len(self._prompts[choice.index // self._n][0]) if r.echo else 0
                self._add(logprobs, e.entries, e.offsets, shift)
            elif isinstance(e, Finish) and e.reason != "error":
                out.append(ChoiceBody(choice.index, "", None, e.reason, e.stop))
        if r.max_tokens == 0:
            return [ChoiceBody(choice.index, "", None, "length")] if out else []
        if text or logprobs:
            out.insert(0, ChoiceBody(choice.index, text, logprobs, None))
        return out


def _char_offsets(data: bytes, offsets: list[int]) -> list[int]:
    """Byte offsets in UTF-8 text as character offsets."""
    chars, at, count = [], 0, 0
    for offset in offsets:
        count += sum((b & 0xC0) != 0x80 for b in data[at:offset])
        at = offset
        inside = offset < len(data) and (data[offset] & 0xC0) == 0x80  # of a character that began before
        chars.append(count - inside)
    return chars
