"""CallSink: where the readers of calls report what they find. It becomes events."""

from __future__ import annotations

import secrets
import string

from lmkit.api import ParseEvent, Text, ToolArgs, ToolEnd, ToolStart

_ALPHANUMERIC = string.ascii_letters + string.digits


class CallSink:
    """Turns calls into events. The arguments of a call join to JSON: `end` closes what is still open."""

    def __init__(self, id_length: int = 0) -> None:
        self._events: list[ParseEvent] = []
        self._texts: list[str] = []  # content that comes after `_events`
        self.num_calls = 0
        self.open = False  # a call began and has not ended
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
        if not id or id in self._ids:
            id = self._new_id()
        self._ids.add(id)
        self.events.append(ToolStart(self.num_calls, id, name))
        self.num_calls += 1
        self.open = True

    def args(self, fragment: str) -> None:
        if fragment:
            self.events.append(ToolArgs(self.num_calls - 1, fragment))

    def end(self, closing: str = "") -> None:
        self.args(closing)
        self.events.append(ToolEnd(self.num_calls - 1))
        self.open = False

    def _new_id(self) -> str:
        self._number += 1
        if not self._id_length:
            return f"call_{self._number % (1 << 96):024x}"
        number, digits = self._number, ""
        for _ in range(self._id_length):
            number, digit = divmod(number, len(_ALPHANUMERIC))
            digits += _ALPHANUMERIC[digit]
        return digits
