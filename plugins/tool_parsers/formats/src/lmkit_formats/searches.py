"""What a parser looks for in an output, derived from the declaration of its format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lmkit.api import ToolDef

from lmkit_formats.calls import CallBody
from lmkit_formats.markers import Markers, markers
from lmkit_formats.syntax import ToolSyntax


@dataclass(frozen=True, slots=True)
class Searches:
    """Made by `searches_of`; parsers only read it."""

    openers: Markers  # in text: what begins a call, a section or opaque text, and what is dropped
    in_section: Markers  # what begins a call there, and what ends the section
    closes: Markers  # the end of a call
    opaque_end: Markers
    dropped: tuple[str, ...]  # the openers that begin nothing, and are not shown
    firsts: tuple[str, ...]  # the brackets that begin a call in a section without `open`
    begins_with_name: bool  # calls in a section without `open` may begin with a name: with anything
    bare: str  # characters that begin a call without a marker, where one may come
    starts_bare: bool  # one may come at the start
    json_body: CallBody  # of the body that begins with "{" or "["
    other_body: CallBody
    only_json: bool  # no other character begins a body
    wrong: re.Pattern[str] | None  # how a body begins that is none, as far as that tells

    def body(self, first: str) -> CallBody:
        """The body that begins with this character."""
        return self.json_body if first in ("{", "[") else self.other_body

    def wrong_at(self, text: str, at: int) -> int | None:
        """Where what begins at `at` turns out to be no body; None where a reader has to find out."""
        if not self.only_json:
            return None
        if text[at] not in "{[":
            return at
        found = self.wrong.match(text, at) if self.wrong is not None else None
        return found.end() if found else None


def searches_of(fmt: ToolSyntax, tools: Sequence[ToolDef]) -> Searches:
    bodies = fmt.body if isinstance(fmt.body, tuple) else (fmt.body,)
    json_bodies = [body for body in bodies if body.is_json]
    json_body = (*json_bodies, *bodies)[0]
    is_named = any(body.is_named for body in bodies)
    all_firsts = "".join(body.first for body in bodies)
    # bodies that follow each other in a section without `open` begin with a bracket or with a name
    firsts = () if fmt.open or is_named else tuple(all_firsts)
    opens = fmt.open if fmt.loose or not fmt.section else ()
    bare = tuple(text for body in bodies for text in body.bare_texts(tools)) if fmt.bare == "anywhere" else ()
    # a call that came without its section may be followed by the end of one
    dropped = (*fmt.drop, *(fmt.section_close if fmt.loose else ()))
    return Searches(
        openers=markers(*opens, *fmt.section, *dropped, *fmt.rearm, *fmt.opaque[:1], *bare),
        in_section=markers(*fmt.open, *fmt.section, *fmt.section_close, *firsts),
        closes=markers(*fmt.close),
        opaque_end=markers(*fmt.opaque[1:]),
        dropped=dropped,
        firsts=firsts,
        begins_with_name=is_named and not fmt.open,
        bare=all_firsts if fmt.bare else "",
        starts_bare=fmt.bare == "start" or (bool(fmt.bare) and not json_body.is_json),
        json_body=json_body,
        other_body=next((body for body in bodies if not body.is_json), bodies[0]),
        only_json=len(json_bodies) == len(bodies),
        wrong=json_body.wrong,
    )
