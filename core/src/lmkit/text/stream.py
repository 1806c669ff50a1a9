"""OutputStream: the tokens of one choice become events. Every dialect is a projection of these events.

    token -> detokenize -> reasoning parser -> tool parser -> stop strings -> Text | Reasoning | Tool* ... Finish

A client's stop strings are about what it sees as the answer: reasoning, tool calls and their markers are passed over.
With `stop_in="output"` in its parameters they are looked for before the parsers, in everything that the model writes.
Streamed and whole replies use the same object, so they cannot differ.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from lmkit.api import (
    Choice,
    Detokenizer,
    ErrorInfo,
    FinishReason,
    ParseEvent,
    ParseWarning,
    PluginError,
    Pooled,
    Reasoning,
    SamplingParams,
    Started,
    StreamParser,
    Text,
    TokenEvent,
    TokenLogprob,
    ToolArgs,
    ToolCut,
    ToolEnd,
    ToolStart,
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
    """The last event of a choice, exactly once. `stop`: the client's stop string or stop token id that ended it; None
    where the model ended by itself."""

    reason: FinishReason
    stop: str | int | None
    usage: Usage
    error: ErrorInfo | None = None
    cut_call: bool = False  # a tool call was begun and not closed by the model: the answer must not pass for calls
    end_token: int | None = None  # the token that ended it, the model's own or one of stop_token_ids


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
    # calls of these tools (True: all) are given when they are complete, and the text of one that was cut as content
    whole_calls: bool | Collection[str] = False
    choices: Sequence[Choice] = ()  # the plugins that errors may come from
    finished: bool = False
    must_abort: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of all of `token_ids`, shown or not
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    _made: int = 0  # characters out of the detokenizer
    _given: int = 0  # characters that the parsers were fed
    _exempt: int = 0  # characters of the output before the border of min_tokens: a stop string does not end there
    _cut: bool = False  # the first call is complete and was to be the only one
    _stop: str | None = None  # the stop string that was found in the content
    _call: int | None = None  # the index of the open call
    _call_events: list[ToolStart | ToolArgs] = field(default_factory=list)  # of the open call, not given yet
    _holds_call: bool = False  # the open call is one of `whole_calls`
    _num_calls: int = 0  # calls that were given, with `whole_calls`
    _cut_call: bool = False  # see Finish
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
            self._pending = []
            self._finish("error", None, e.info(), events)
        return events

    @property
    def _stops_first(self) -> bool:
        """True where stop strings are looked for before the parsers."""
        return self.parser is None or self.params.stop_in == "output"

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
                if self._stops_first and self.parser is not None and not self._cut:
                    self._emit(self.parser.flush(), events)
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
        if stop is None and self._stops_first:
            self._parse(self.stops.flush(), events)
        if self.parser is not None and not self._cut and self._stop is None:
            self._emit(self.parser.flush(), events, final=True)
            stop = stop if stop is not None else self._stop
        reason = event.finish or "stop"
        if stop is not None and reason == "length":
            reason = "stop"
        token = event.stop_token
        asked = token if token in self.params.stop_token_ids else None  # else the model ended by itself
        self._finish(reason, stop if stop is not None else asked, event.error, events, token)

    def _text(self, text: str, events: list[OutputEvent]) -> str | None:
        """Passes new text on; returns the stop string that was found."""
        began, self._made = self._made, self._made + len(text)
        if self.usage.completion_tokens < self.params.min_tokens:
            self._exempt = self._made
        stop: str | None = None
        if self._stops_first:
            text, stop = self.stops.feed(text, max(0, self._exempt - began))
        self._parse(text, events)
        return stop if stop is not None else self._stop

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

    def _emit(self, parsed: Sequence[ParseEvent], events: list[OutputEvent], final: bool = False) -> None:
        """Logprobs go out with the text of their token; those of reasoning, calls and markers are dropped."""
        parsed = self._with_ends(parsed)
        if self._stops_first:
            decided = self._given - getattr(self.parser, "pending", 0)
        else:
            parsed, decided = self._up_to_stop(parsed, final)
        if self._pending:
            begin = decided - sum(len(e.text) for e in parsed if type(e) is Text)
            ready = [p for p in self._pending if p[0] < decided]
            self._pending = self._pending[len(ready) :]
            if shown := [p for p in ready if p[0] >= begin]:
                events.append(Logprobs([entry for _, entry in shown], [at for at, _ in shown]))
        if self.single_call and parsed:
            parsed = self._first_call(parsed)
        events += self._only_whole(parsed) if self.whole_calls else parsed

    def _up_to_stop(self, parsed: Sequence[ParseEvent], final: bool) -> tuple[Sequence[ParseEvent], int]:
        """The events before the first stop string of the content, and how many characters of the output they decide.

        A stop string does not go across reasoning or a call.
        """
        end = self._given - getattr(self.parser, "pending", 0)
        if self._stop is not None:
            return [], end
        size = self.stops.pending + sum(len(e.text) for e in parsed if type(e) is Text)
        at = end - size + self.stops.pending  # where the next content stands in the output
        shown: list[ParseEvent] = []
        for event in parsed:
            if type(event) is Text:
                text, self._stop = self.stops.feed(event.text, max(0, min(len(event.text), self._exempt - at)))
                at += len(event.text)
                shown += [Text(text)] if text else []
                if self._stop is not None:
                    break
            else:
                if type(event) is not ParseWarning:
                    self._release(shown)
                shown.append(event)
        if final and self._stop is None:
            self._release(shown)
        return shown, end - size + sum(len(e.text) for e in shown if type(e) is Text)

    def _release(self, shown: list[ParseEvent]) -> None:
        """Releases held back text that turned out to be no stop string."""
        if held := self.stops.flush():
            shown.append(Text(held))

    def _with_ends(self, parsed: Sequence[ParseEvent]) -> Sequence[ParseEvent]:
        """A call that has no end when the next one begins was cut."""
        if len(parsed) == 1 and type(parsed[0]) is Text:  # nearly always
            return parsed
        whole: list[ParseEvent] = []
        for event in parsed:
            match event:
                case ToolStart(index):
                    whole += self._cut_open_call()
                    self._call = index
                case ToolEnd():
                    self._call = None
                case ToolCut():
                    self._call, self._cut_call = None, True
                case ParseWarning(in_call=True):
                    self._cut_call = True
            whole.append(event)
        return whole

    def _cut_open_call(self) -> list[ParseEvent]:
        if self._call is None:
            return []
        index, self._call, self._cut_call = self._call, None, True
        return [ToolCut(index)]

    def _only_whole(self, parsed: Sequence[ParseEvent]) -> list[ParseEvent]:
        """Calls of `whole_calls` when they are complete; what the model wrote of one that was cut is content."""
        shown: list[ParseEvent] = []
        for event in parsed:
            match event:
                case ToolStart(_, id, name):
                    whole = self.whole_calls
                    self._holds_call = whole if isinstance(whole, bool) else name in whole
                    self._call_events = [ToolStart(self._num_calls, id, name)]
                case ToolArgs(_, fragment):
                    self._call_events.append(ToolArgs(self._num_calls, fragment))
                case ToolEnd():
                    shown += [*self._call_events, ToolEnd(self._num_calls)]
                    self._call_events, self._num_calls = [], self._num_calls + 1
                case ToolCut(_, text) if self._holds_call:
                    shown.append(Text(text or _as_text(self._call_events)))
                    self._call_events = []
                case ToolCut(_, text):
                    shown += [*self._call_events, ToolCut(self._num_calls, text)]
                    self._call_events, self._num_calls = [], self._num_calls + 1
                case _:
                    shown.append(event)
            if not self._holds_call:
                shown += self._call_events
                self._call_events = []
        return shown

    def _first_call(self, parsed: Sequence[ParseEvent]) -> Sequence[ParseEvent]:
        """Nothing comes after the first call; `feed` ends the stream."""
        for i, event in enumerate(parsed):
            if type(event) is ToolEnd:
                self._cut = True
                return parsed[: i + 1]
        return parsed

    def _finish(self, reason: FinishReason, stop: str | int | None, error: ErrorInfo | None,
                events: list[OutputEvent], token: int | None = None) -> None:  # fmt: skip
        if self._pending and not isinstance(stop, str) and not getattr(self.reasoning, "inside", False):
            events.append(Logprobs([e for _, e in self._pending], [at for at, _ in self._pending]))
        self._pending = []
        cut = self._cut_open_call()
        events += self._only_whole(cut) if self.whole_calls else cut
        self.finished = True
        events.append(Finish(reason, stop, self.usage, error, self._cut_call, token))


def _as_text(call: Sequence[ToolStart | ToolArgs]) -> str:
    """A call of a parser that does not keep what the model wrote of it."""
    return "".join(e.name + " " if isinstance(e, ToolStart) else e.json_fragment for e in call)


__all__ = ["Finish", "Logprobs", "OutputEvent", "OutputStream", "Reasoning", "Usage"]
