"""CallSink: where the readers of calls report what they find. It becomes events."""

from __future__ import annotations

import secrets
import string

from lmkit.api import ParseEvent, Text, ToolArgs, ToolCut, ToolEnd, ToolStart

_ALPHANUMERIC = string.ascii_letters + string.digits


class CallSink:
    """Turns calls into events.

    A call is announced with the first text of its arguments, for clients take empty arguments for an empty object. It
    is complete only when a reader says so with `end`: nothing is ever added to make cut arguments parse.
    """

    def __init__(self, id_length: int = 0) -> None:
        self._events: list[ParseEvent] = []
        self._texts: list[str] = []  # content that comes after `_events`
        self.num_calls = 0
        self.open = False  # a call was announced and has not ended
        self._begun: tuple[str, str] | None = None  # name and id of a call that is not announced yet
        self._id_length = id_length
        self._ids: set[str] = set()
        self._number = secrets.randbits(96)  # of the next id: they count from a random one

    @property
    def events(self) -> list[ParseEvent]:
        """What there is so far, to append to. Neighbouring pieces of content are one event."""
        if self._texts:
            self._events.append(Text("".join(self._texts)))
            self._texts = []
        return self._events

    def take(self) -> list[ParseEvent]:
        """The events, once."""
        events, self._events = self.events, []
        return events

    def text(self, text: str) -> None:
        self._texts.append(text)

    def start(self, name: str, id: str = "") -> None:
        """A call begins. It takes the place of one that was begun and not announced."""
        self._begun = name, id

    def args(self, fragment: str) -> None:
        if not fragment:
            return
        if self._begun is not None:
            self._announce(*self._begun)
        self.events.append(ToolArgs(self.num_calls - 1, fragment))

    def end(self, closing: str = "") -> None:
        """The model closed the call. `closing` ends arguments that were converted to JSON."""
        self.args(closing or ("{}" if self._begun is not None else ""))
        self.events.append(ToolEnd(self.num_calls - 1))
        self.open = False

    def cut(self, text: str) -> None:
        """The announced call ends without being closed. `text`: what the model wrote of it."""
        self.events.append(ToolCut(self.num_calls - 1, text))
        self.open = False

    def drop(self) -> None:
        """A call that was begun and not announced is none."""
        self._begun = None

    def _announce(self, name: str, id: str) -> None:
        self._begun = None
        if not id or id in self._ids:
            id = self._new_id()
        self._ids.add(id)
        self.events.append(ToolStart(self.num_calls, id, name))
        self.num_calls += 1
        self.open = True

    def _new_id(self) -> str:
        self._number += 1
        if not self._id_length:
            return f"call_{self._number % (1 << 96):024x}"
        number, digits = self._number, ""
        for _ in range(self._id_length):
            number, digit = divmod(number, len(_ALPHANUMERIC))
            digits += _ALPHANUMERIC[digit]
        return digits
