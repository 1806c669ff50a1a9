"""How a family writes its tool calls, as data. The parser, the grammar and the writer all go by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lmkit_formats.calls import JsonCalls, NamedJson
from lmkit_formats.looseobject import LooseObject
from lmkit_formats.params import Params
from lmkit_formats.pycalls import PyCalls

CallBody = JsonCalls | NamedJson | Params | PyCalls | LooseObject


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """How a family writes tool calls. The core runs all of them with one machine: a plugin ships data and no code.

    `open` and `close` stand around one body, `section` around all of them. A body of JsonCalls with a list, or of
    PyCalls, holds any number of calls. Of several bodies the JSON one is used where "{" or "[" follows. A bracket at
    the end of `open` belongs to the body; an empty first text says that the family writes no marker.
    """

    name: str
    body: CallBody | tuple[CallBody, ...]
    open: tuple[str, ...] = ()
    close: tuple[str, ...] = ()
    section: tuple[str, ...] = ()  # what begins a section; `section_close` ends it
    section_close: tuple[str, ...] = ()
    loose: bool = False  # a call may come without its section
    bare: Literal["", "start", "anywhere"] = ""  # where a body may come without `open`
    rearm: tuple[str, ...] = ()  # content after which a bare body may come again
    separators: str = ""  # characters that may stand between calls, besides blanks
    noise: Literal["content", "drop"] = "content"  # text in a section and outside of its calls; dropped with a warning
    drop: tuple[str, ...] = ()  # texts that the family writes around calls or content, and nobody wants to see
    opaque: tuple[str, ...] = ()  # two texts: content between them holds no calls
    trim: bool = False  # blanks between content and a call belong to the call
    inner: str = ""  # blanks that the family writes inside of `open` and `close`
    between: str = ""  # what it writes between calls; blanks also inside of the section
    begun: str = ""  # the beginning of `open` that the prompt ends with: the output goes on with the rest
    id_length: int = 0  # call ids are this many letters and digits; 0 = "call_" and 24 hex digits

    @property
    def keep_special(self) -> frozenset[str]:
        texts = [*self.open, *self.close, *self.section, *self.section_close, *self.drop, *self.rearm]
        for body in self.body if isinstance(self.body, tuple) else (self.body,):
            if isinstance(body, NamedJson):
                texts += [*body.ends, *body.prefix, body.id_mark]
            elif isinstance(body, Params):
                texts += [*body.name_ends, body.open, *body.key_ends, body.close, body.foot, *body.prefix]
                texts.append(body.value_open)
            elif isinstance(body, LooseObject):
                texts += [*body.quotes, *body.prefix]
        return frozenset(t for t in texts if t and t not in "{[")
