"""A format with a parser of its own. One that is markers around JSON, as most are, needs no code: see the scaffold of
`lmkit plugins new tool_parser`, a declaration that the library lmkit_formats runs.

    @get_weather
    city = "Paris"
    days = 3
    @end
"""

import json
import re
from uuid import uuid4

from lmkit.api import Grammar, ParseWarning, Text, ToolArgs, ToolEnd, ToolStart

PIECE = re.compile(r"[^\n]*\n|[^\n]+")  # a line, or what there is of it
ARGUMENT = re.compile(r"([\w.-]+) = (.*)\n?")
PLAIN = ("string", "integer", "number", "boolean", "null")  # JSON of these types never spans lines


class Lines:
    """Contract: lmkit.api.ParserFormat."""

    name = "lines"
    keep_special = frozenset()  # no marker is a special token of the vocabulary, which decoding would drop

    def start(self, prompt_tail, tools):
        return LinesParser({tool.name for tool in tools})

    def grammar(self, tools, choice):
        """What required and named calls may look like: one call of any of the tools. None: cannot be constrained,
        which the request is told."""
        calls = [call_of(tool) for tool in tools]
        if None in calls:
            return None
        tag = {"type": "structural_tag", "format": {"type": "or", "elements": calls}}
        return Grammar("structural_tag", json.dumps(tag))


def call_of(tool):
    """A call as a structural tag; None where an argument could span lines."""
    properties = tool.parameters.get("properties", {})
    needed = tool.parameters.get("required") or list(properties)
    parts = [constant(f"@{tool.name}\n")]
    for name in needed:
        schema = properties.get(name, {})
        if schema.get("type") not in PLAIN:
            return None
        parts += [constant(f"{name} = "), {"type": "json_schema", "json_schema": schema}, constant("\n")]
    return {"type": "sequence", "elements": [*parts, constant("@end")]}


def constant(text):
    return {"type": "const_string", "value": text}


class LinesParser:
    """Contract: lmkit.api.StreamParser. However a text is cut into pieces, the message is the same. Text is passed on
    at once; only a line that begins with @, and those of a call, wait for their end."""

    def __init__(self, names):
        self._names = names
        self._line = []  # pieces of a line that waits for its end; joined once, so that the work is linear
        self._at_start = True  # of a line
        self._call = None  # (name, arguments) of the call that has begun
        self._raw = []  # its lines, to be shown as text where it breaks off
        self._count = 0

    def feed(self, text, ids=()):
        return [event for piece in PIECE.findall(text) for event in self._piece(piece)]

    def flush(self):
        line, self._line = "".join(self._line), []
        events = self._whole(line) if line else []
        return events + (self._broken("the output ends within a call") if self._call else [])

    def _piece(self, piece):
        waits = self._call or self._line or (self._at_start and piece[0] == "@")
        self._at_start = piece.endswith("\n")
        if not waits:
            return [Text(piece)]
        self._line.append(piece)
        if not self._at_start:
            return []
        line, self._line = "".join(self._line), []
        return self._whole(line)

    def _whole(self, line):
        if self._call is None:
            name = line.rstrip()[1:]
            if name not in self._names:
                return [Text(line)]
            self._call, self._raw = (name, {}), [line]
            return []
        self._raw.append(line)
        if line.rstrip() == "@end":
            (name, arguments), self._call = self._call, None
            index, self._count = self._count, self._count + 1
            start = ToolStart(index, f"call_{uuid4().hex}", name)
            return [start, ToolArgs(index, json.dumps(arguments, ensure_ascii=False)), ToolEnd(index)]
        found = ARGUMENT.fullmatch(line)
        try:
            self._call[1][found[1]] = json.loads(found[2])
        except (TypeError, ValueError, RecursionError):  # no such line, or no JSON
            return self._broken("a line within a call is no `name = JSON`")
        return []

    def _broken(self, why):
        """No word is lost: what is no call is text."""
        raw, self._call = "".join(self._raw), None
        return [ParseWarning(why), Text(raw)]
