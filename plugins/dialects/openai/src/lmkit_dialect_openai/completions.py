"""/v1/completions: prompts as text or token ids, several at once, with echo and logprobs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import msgspec
from lmkit.api import TokenLogprob
from lmkit_http.dialect import Change, Exchange, Served, TextAsk, Turn, UnsupportedField
from lmkit_http.logprobs import finite, label

from lmkit_dialect_openai.schema import CompletionRequest
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
    system_fingerprint: str


class Completions(Exchange):
    """One request with one or more prompts; choice i of prompt p has index p * n + i."""

    id_kind = "cmpl"

    def __init__(self, request: CompletionRequest, served: Served) -> None:
        super().__init__(ask_of(request, served))
        self._request, self._tokenizer = request, served.tokenizer
        self._model = request.model or served.names[0]
        self._created, self._fingerprint = int(time.time()), fingerprint(served)
        self.streamed = bool(request.stream)
        options = request.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._each_usage = bool(self._with_usage and options and options.continuous_usage_stats)
        self._head, self._tail = chunk_frame(
            self.id, "text_completion", self._created, self._model, self._fingerprint, self._with_usage
        )
        self.headers = answer_headers(request, self.id)
        self._begun: set[int] = set()
        self._ids = NewIds(request.return_token_ids)

    # -- whole

    def whole(self, turns: Sequence[Turn]) -> bytes:
        usage = self._usage(turns)
        bodies = [self._choice(turn) for turn in self._best(turns)]
        for index, body in enumerate(bodies):
            body.index = index
        return _encode(
            CompletionBody(self.id, "text_completion", self._created, self._model, bodies, usage, self._fingerprint)
        )

    def _usage(self, turns: Sequence[Turn]) -> UsageBody:
        usages = [turn.stream.usage for turn in turns]
        if self._request.max_tokens == 0:
            for usage in usages:
                usage.completion_tokens = 0
        return usage_of(usages, self._request.num_answers)

    def _best(self, turns: Sequence[Turn]) -> list[Turn]:
        """The n answers to each prompt whose tokens were likeliest, on average; all where no more were made."""
        shown, made = self._request.n or 1, self._request.num_answers
        if shown == made:
            return list(turns)
        groups = [turns[i : i + made] for i in range(0, len(turns), made)]
        return [turn for group in groups for turn in sorted(group, key=_surprise)[:shown]]

    def _choice(self, turn: Turn) -> ChoiceBody:
        r, message, finish = self._request, turn.message, turn.message.finish
        prompt, prompt_ids = turn.prompt or "", turn.request.token_ids
        assert finish is not None
        text, token_ids = message.content, turn.stream.token_ids
        logprobs = None
        if r.logprobs is not None:
            logprobs = LogprobsBody([], [], [], [])
            last = _stop_token(turn)
            self._add(logprobs, message.logprobs + last, message.offsets + [len(text)] * len(last))
        if r.max_tokens == 0:
            text, token_ids, logprobs = "", [], logprobs and LogprobsBody([], [], [], [])
        if r.echo:
            text = prompt + text
            if logprobs is not None:
                logprobs = self._echo(logprobs, prompt, prompt_ids, turn.stream.prompt_logprobs)
        body = ChoiceBody(turn.index, text, logprobs, "length" if r.max_tokens == 0 else finish.reason, finish.stop)
        if r.return_token_ids:
            body.token_ids, body.prompt_token_ids = token_ids, prompt_ids
        if r.prompt_logprobs is not None:
            body.prompt_logprobs = prompt_logprobs(turn.stream.prompt_logprobs, self._tokenizer)
        return body

    def _add(self, body: LogprobsBody, entries: list[TokenLogprob], offsets: list[int], shift: int = 0) -> None:
        named = partial(label, self._tokenizer, by_id=bool(self._request.return_tokens_as_token_ids))
        num_top = self._request.logprobs or 0
        for e, at in zip(entries, offsets, strict=True):
            token = named(e.token)
            body.tokens.append(token)
            body.token_logprobs.append(finite(e.logprob))
            body.text_offset.append(shift + at)
            top = {named(t): finite(p) for t, p in reversed(e.top[:num_top])}
            body.top_logprobs.append(dict(reversed(top.items())) | {token: finite(e.logprob)})

    def _echo(
        self, output: LogprobsBody, prompt: str, prompt_ids: list[int], entries: list[TokenLogprob]
    ) -> LogprobsBody:
        """The prompt's tokens in front; the first has no logprob. Offsets follow the pieces."""
        body = LogprobsBody([], [], [], [])
        pieces = [self._tokenizer.piece(t) for t in prompt_ids]
        body.tokens.append(label(self._tokenizer, prompt_ids[0], bool(self._request.return_tokens_as_token_ids)))
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

    def chunk(self, turn: Turn, change: Change) -> bytes:
        index, out = turn.index, []
        first = index not in self._begun
        if self._request.echo and first:
            out.append(self._echo_chunk(turn))
        out += self._chunks(turn, change)
        if first and out:
            self._begun.add(index)
            if self._request.return_token_ids:
                out[0].prompt_token_ids = turn.request.token_ids
        head, tail = self._head, self._tail
        if self._each_usage:
            tail = b'],"usage":' + _encode(self._usage([turn])) + b"}\n\n"
        return b"".join([head + _encode(choice) + tail for choice in out])

    def _echo_chunk(self, turn: Turn) -> ChoiceBody:
        prompt, prompt_ids = turn.prompt or "", turn.request.token_ids
        logprobs = None
        if self._request.logprobs is not None:
            logprobs = self._echo(LogprobsBody([], [], [], []), prompt, prompt_ids, turn.stream.prompt_logprobs)
        return ChoiceBody(turn.index, prompt, logprobs, None)

    def _chunks(self, turn: Turn, change: Change) -> list[ChoiceBody]:
        r, finish = self._request, change.finish
        ended = finish is not None and finish.reason != "error"
        if r.max_tokens == 0:
            return [ChoiceBody(turn.index, "", None, "length")] if ended else []
        out, logprobs = [], None
        last = _stop_token(turn) if finish is not None else []
        if (change.logprobs or last) and r.logprobs is not None:
            logprobs = LogprobsBody([], [], [], [])
            offsets = change.offsets + [len(turn.message.content)] * len(last)
            self._add(logprobs, change.logprobs + last, offsets, len(turn.prompt or "") if r.echo else 0)
        if change.content or logprobs:
            out.append(ChoiceBody(turn.index, change.content, logprobs, None, token_ids=self._ids.take(turn)))
        if finish is not None and ended:
            ids = self._ids.take(turn)
            out.append(ChoiceBody(turn.index, "", None, finish.reason, finish.stop, token_ids=ids))
        return out

    def explained(self, told: bytes) -> bytes:
        return self._head + b'],"lmkit":' + told + b"}\n\n"

    def end(self, turns: Sequence[Turn]) -> bytes:
        if not self._with_usage:
            return b""
        return self._head + b'],"usage":' + _encode(self._usage(turns)) + b"}\n\n"


def ask_of(request: CompletionRequest, served: Served) -> TextAsk:
    """Raises RequestError."""
    r, prompts, n = request, request.prompts(), request.num_answers
    if len(prompts) * (made := max(n, r.best_of or 1)) > served.max_choices:
        raise UnsupportedField("n", f"{len(prompts)} prompts x n={made} are more than {served.max_choices} choices")
    if r.max_tokens == 0 and not r.echo:
        raise UnsupportedField("max_tokens", "max_tokens=0 is only allowed with echo=true")
    max_tokens = 1 if r.max_tokens == 0 else r.max_tokens
    ranked = n > (r.n or 1)  # by what only log-probabilities tell
    params = r.params(served, max_tokens, r.logprobs if not ranked else r.logprobs or 0)
    params = replace(params, grammar=r.answer_grammar())
    if r.echo and r.logprobs is not None and params.prompt_logprobs is None:
        params = replace(params, prompt_logprobs=r.logprobs)
    return TextAsk(
        prompts=prompts,
        add_special=r.add_special_tokens is not False,
        shows_prompts=bool(r.echo),
        scores_each=True,
        default_tokens=_DEFAULT_TOKENS,
        params=params,
        n=n,
        beams=r.beams(r.best_of or n),
        adapter=served.adapter(r.model),
        dropped=r.dropped,
        priority=r.priority or 0,
        salt=r.cache_salt,
        resume=r.resume,
        include_stop=r.includes_stop,
        skip_special=r.skip_special_tokens is not False,
        grammar_field=r.answer_field,
        last=r.last(served, max_tokens or _DEFAULT_TOKENS),
    )


def _stop_token(turn: Turn) -> list[TokenLogprob]:
    """The entry of the token that ended the answer and has no text in it: each token that was made has an entry."""
    finish, entries = turn.message.finish, turn.stream.logprobs
    ends = finish is not None and finish.end_token is not None and len(turn.message.logprobs) < len(entries)
    return entries[-1:] if ends else []


def _surprise(turn: Turn) -> float:
    """The mean of the negative log-probabilities of an answer's tokens, its end included."""
    entries = turn.stream.logprobs
    return -sum(entry.logprob for entry in entries) / max(1, len(entries))


def _char_offsets(data: bytes, offsets: list[int]) -> list[int]:
    """Byte offsets in UTF-8 text as character offsets."""
    chars, at, count = [], 0, 0
    for offset in offsets:
        count += sum((b & 0xC0) != 0x80 for b in data[at:offset])
        at = offset
        inside = offset < len(data) and (data[offset] & 0xC0) == 0x80  # of a character that began before
        chars.append(count - inside)
    return chars
