"""OutputStream: the tokens of one choice become events. Every dialect is a projection of these events.

    token -> detokenize -> stop strings -> reasoning parser -> tool parser -> Text | Reasoning | Tool* ... Finish

Streamed and whole replies use the same object, so they cannot differ.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from lmkit.api import (
    Choice,
    Detokenizer,
    ErrorInfo,
    FinishReason,
    ParseEvent,
    PluginError,
    Pooled,
    Reasoning,
    SamplingParams,
    Started,
    StreamParser,
    Text,
    TokenEvent,
    TokenLogprob,
    ToolEnd,
    blame,
)
from lmkit.text.stops import Stops

log = logging.getLogger("lmkit.plugins")


@dataclass(slots=True)
class Usage:
    """Token counts of one choice, and how it came to its first. `reasoning_tokens` is part of `completion_tokens`."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    draft_tokens: int = 0  # guessed or forced, and verified
    accepted_tokens: int = 0  # of these, that were right
    started: Started | None = None  # None: it did not, or nobody said


@dataclass(frozen=True, slots=True)
class Logprobs:
    """What is known of the tokens that made the Text that follows; `offsets`: where each begins in the text."""

    entries: list[TokenLogprob]
    offsets: list[int]


@dataclass(frozen=True, slots=True)
class Finish:
    """The last event of a choice, exactly once. `stop`: the stop string or stop token id that ended it."""

    reason: FinishReason
    stop: str | int | None
    usage: Usage
    error: ErrorInfo | None = None


OutputEvent = ParseEvent | Logprobs | Pooled | Finish


@dataclass(slots=True)
class OutputStream:
    """Made by TextSide.output_stream. After `finished` nothing more comes; `must_abort` says the engine goes on."""

    params: SamplingParams
    detokenizer: Detokenizer
    stops: Stops
    parser: StreamParser | None
    reasoning: object | None  # the reasoning stage, whose `inside` says where the tokens belong
    usage: Usage
    show_stop: bool = False  # include the stop string or stop token in the text
    single_call: bool = False  # end after the first tool call
    choices: Sequence[Choice] = ()  # the plugins that errors may come from
    finished: bool = False
    must_abort: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of all of `token_ids`, shown or not
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    _made: int = 0  # characters out of the detokenizer
    _given: int = 0  # characters past the stop strings
    _cut: bool = False  # the first call is complete and was to be the only one
    _pending: list[tuple[int, TokenLogprob]] = field(default_factory=list)  # (offset, entry) not yet given

    def feed(self, event: TokenEvent) -> list[OutputEvent]:
        """Events of one TokenEvent, in order; [] after the end. A plugin's parser or tokenizer that fails ends it."""
        if self.finished:
            return []
        events: list[OutputEvent] = []
        try:
            self._feed(event, events)
        except Exception as error:
            e = blame(error, self.choices)
            if not isinstance(e, PluginError):
                raise
            if e is not error:
                log.error("%s", e.message, exc_info=error)
            self.must_abort = event.finish is None
            self._cut, self._pending = True, []
            self._finish("error", None, e.info(), events)
        return events

    def _feed(self, event: TokenEvent, events: list[OutputEvent]) -> None:
        if event.num_cached is not None:
            self.usage.cached_tokens = event.num_cached
        if event.started is not None:
            self.usage.started = event.started
        if event.drafts is not None:
            self.usage.draft_tokens += event.drafts[0]
            self.usage.accepted_tokens += event.drafts[1]
        if event.prompt_logprobs:
            self.prompt_logprobs += event.prompt_logprobs
        if event.logprobs:
            self.logprobs += event.logprobs
        tokens = event.tokens
        ended = event.stop_token is not None
        for i, token in enumerate(tokens):
            self.token_ids.append(token)
            self.usage.completion_tokens += 1
            if ended and i == len(tokens) - 1 and not self.show_stop:
                break
            if i < len(event.logprobs):
                self._pending.append((self._made, event.logprobs[i]))
            stop = self._text(self.detokenizer.feed(token), events)
            if stop is not None or self._cut:
                self.must_abort = event.finish is None
                self._finish("stop", stop, None, events)
                return
        if event.pooled is not None:
            events.append(event.pooled)
        if event.finish is not None:
            self._end(event, events)

    def fail(self, error: ErrorInfo) -> list[OutputEvent]:
        """Ends the stream from this side."""
        return self.feed(TokenEvent("", finish="error", error=error))

    def _end(self, event: TokenEvent, events: list[OutputEvent]) -> None:
        stop = self._text(self.detokenizer.flush(), events)
        if stop is None:
            self._parse(self.stops.flush(), events)
        reason = event.finish or "stop"
        if stop is not None and reason == "length":
            reason = "stop"
        self._finish(reason, stop if stop is not None else event.stop_token, event.error, events)

    def _text(self, text: str, events: list[OutputEvent]) -> str | None:
        """Passes new text on; returns the stop string that was found."""
        self._made += len(text)
        if self.usage.completion_tokens < self.params.min_tokens:
            self._parse(text, events)
            return None
        text, stop = self.stops.feed(text)
        self._parse(text, events)
        return stop

    def _parse(self, text: str, events: list[OutputEvent]) -> None:
        self._given += len(text)
        was_inside = getattr(self.reasoning, "inside", False)
        if self.parser is None:
            parsed: list[ParseEvent] = [Text(text)] if text else []
        else:
            parsed = self.parser.feed(text) if text else []
        if was_inside or getattr(self.reasoning, "inside", False):
            self.usage.reasoning_tokens = min(self.usage.reasoning_tokens + 1, self.usage.completion_tokens)
        self._emit(parsed, events)

    def _emit(self, parsed: Sequence[ParseEvent], events: list[OutputEvent]) -> None:
        """Logprobs go out with the text of their token; those of reasoning, calls and markers are dropped."""
        if self._pending:
            decided = self._given - getattr(self.parser, "pending", 0)
            begin = decided - sum(len(e.text) for e in parsed if type(e) is Text)
            ready = [p for p in self._pending if p[0] < decided]
            self._pending = self._pending[len(ready) :]
            if shown := [p for p in ready if p[0] >= begin]:
                events.append(Logprobs([entry for _, entry in shown], [at for at, _ in shown]))
        if self.single_call and parsed:
            parsed = self._first_call(parsed)
        events += parsed

    def _first_call(self, parsed: Sequence[ParseEvent]) -> Sequence[ParseEvent]:
        """Nothing comes after the first call; `feed` ends the stream."""
        for i, event in enumerate(parsed):
            if type(event) is ToolEnd:
                self._cut = True
                return parsed[: i + 1]
        return parsed

    def _finish(self, reason: FinishReason, stop: str | int | None, error: ErrorInfo | None,
                events: list[OutputEvent]) -> None:  # fmt: skip
        if self.parser is not None and not self._cut:
            self._emit(self.parser.flush(), events)
        if self._pending and not isinstance(stop, str) and not getattr(self.reasoning, "inside", False):
            events.append(Logprobs([e for _, e in self._pending], [at for at, _ in self._pending]))
        self._pending = []
        self.finished = True
        events.append(Finish(reason, stop, self.usage, error))


__all__ = ["Finish", "Logprobs", "OutputEvent", "OutputStream", "Reasoning", "Usage"]
