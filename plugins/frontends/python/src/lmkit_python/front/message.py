"""Message: the one fold of a choice's events. What is streamed are the changes, what is whole is their sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from lmkit.api import Pooled, Reasoning, Text, TokenLogprob, ToolArgs, ToolEnd, ToolStart
from lmkit.text.stream import Finish, Logprobs, OutputEvent


@dataclass(slots=True)
class ToolCall:
    """A tool call of an answer. `arguments` is the JSON text that the model wrote.

    `complete` is False for a call that the model did not close: its arguments are cut, do not parse, and must not be
    executed.
    """

    id: str
    name: str
    arguments: str = ""
    complete: bool = True


class CallChange(msgspec.Struct):
    """What one change adds to the call `index`: its beginning (`id` and `name`), text of its arguments, or that the
    model has closed it (`complete`)."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    complete: bool = False


class Change(msgspec.Struct):
    """What one feed adds to a message. `offsets`: where the tokens of `logprobs` begin in the content, in characters.

    `finish` is the last thing of a message, in its last change.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[CallChange] = []
    logprobs: list[TokenLogprob] = []
    offsets: list[int] = []
    pooled: Pooled | None = None
    finish: Finish | None = None


def change_of(events: Sequence[OutputEvent]) -> Change:
    """The events of one feed as one change."""
    change = Change()
    for event in events:
        match event:
            case Text(text):
                change.content += text
            case Reasoning(text):
                change.reasoning += text
            case ToolStart(index, id, name):
                change.calls.append(CallChange(index, id, name))
            case ToolArgs(index, fragment):
                _call_of(change, index).arguments += fragment
            case ToolEnd(index):
                _call_of(change, index).complete = True
            case Logprobs(entries, offsets):
                change.logprobs += entries
                change.offsets += offsets
            case Pooled():
                change.pooled = event
            case Finish():
                change.finish = event
    return change


def _call_of(change: Change, index: int) -> CallChange:
    if not change.calls or change.calls[-1].index != index:
        change.calls.append(CallChange(index))
    return change.calls[-1]


@dataclass(slots=True)
class Part:
    """A run of content or of reasoning, or a call."""

    kind: str  # "content", "reasoning", "call"
    id: str = ""  # of a call
    name: str = ""
    pieces: list[str] = field(default_factory=list)  # of the text, or of the arguments
    first: int = 0  # of its log-probabilities, among those of the message
    complete: bool = True  # False: a call that the model has not closed

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class Message:
    """What the events of one choice amount to. Pieces are joined when they are asked for."""

    parts: list[Part] = field(default_factory=list)  # in the order in which they began
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of the tokens of the content
    offsets: list[int] = field(default_factory=list)
    pooled: Pooled | None = None  # the vectors, which are all there is of an answer that has some
    finish: Finish | None = None
    _calls: list[Part] = field(default_factory=list)

    def feed(self, events: Sequence[OutputEvent]) -> Change:
        """Takes the events of one feed; what they add."""
        if len(events) == 1 and type(event := events[0]) is Text:  # nearly all of them: this is done for each token
            self._grow("content", event.text)
            return Change(event.text)
        change = change_of(events)
        self.add(change)
        return change

    def add(self, change: Change) -> None:
        self._grow("reasoning", change.reasoning)
        self._grow("content", change.content)
        for call in change.calls:
            if call.id is not None:
                self._calls.append(Part("call", call.id, call.name or "", complete=False))
                self.parts.append(self._calls[-1])
            part = self._calls[call.index]
            if call.arguments:
                part.pieces.append(call.arguments)
            part.complete = part.complete or call.complete
        self.logprobs += change.logprobs
        self.offsets += change.offsets
        self.pooled = change.pooled or self.pooled
        self.finish = change.finish or self.finish

    def _grow(self, kind: str, text: str) -> None:
        if text and (not self.parts or self.parts[-1].kind != kind):
            self.parts.append(Part(kind, first=len(self.logprobs)))
        if text:
            self.parts[-1].pieces.append(text)

    def _text(self, kind: str) -> str:
        return "".join(part.text for part in self.parts if part.kind == kind)

    @property
    def content(self) -> str:
        return self._text("content")

    @property
    def reasoning(self) -> str:
        return self._text("reasoning")

    @property
    def calls(self) -> list[ToolCall]:
        return [ToolCall(part.id, part.name, part.text, part.complete) for part in self._calls]
