"""Outputs of models for tests of parsers: well-formed ones made from a declaration, and broken ones made from these."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lmkit.api import ToolDef
from lmkit_formats import Params, ToolFormat
from lmkit_formats.derive import primary

TOOLS = (
    ToolDef("get_weather", parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["c", "f"]},
                       "places": {"type": "array"}, "near": {"type": ["object", "null"]}, "exact": {"type": "boolean"}},
    }),
    ToolDef("now"),
)  # fmt: skip
Calls = list[tuple[str, dict[str, Any]]]
CALLS: Sequence[Calls] = (
    [("get_weather", {"city": "Sao Paulo"})],
    [("now", {})],
    [("get_weather", {"city": "K\u00f6ln \u2013 \U0001f327", "days": 3, "unit": "c", "exact": True})],
    [("get_weather", {"city": 'a "quoted", \\ [odd] {one}', "places": ["x", 1.5, [None, {"y": "z"}]]}), ("now", {})],
    [("now", {}), ("get_weather", {"near": {"lat": -1, "lon": 2e3}, "city": "two\nlines, 'and' more"})],
)
_WORD = re.compile(r"wa\d+ez")


def examples(fmt: ToolFormat) -> list[tuple[str, Calls]]:
    """Outputs as the family writes them, and their calls."""
    body = primary(fmt)
    verbatim = isinstance(body, Params) and body.verbatim
    return [(fmt.write(calls, TOOLS), _as_strings(calls) if verbatim else calls) for calls in CALLS]


def _as_strings(calls: Calls) -> Calls:
    """The calls in a format whose values are strings as they are written."""
    return [(name, {k: v if isinstance(v, str) else json.dumps(v) for k, v in a.items()}) for name, a in calls]


def with_words(fmt: ToolFormat, source: random.Random) -> str:
    """An output with words that occur once, in its content and in its arguments."""
    words = [f"wa{source.randrange(10**6)}ez" for _ in range(4)]
    calls: Sequence[tuple[str, Mapping[str, Any]]] = [
        ("get_weather", {"city": words[0], "days": source.randint(0, 99), "places": [words[1], "x"]}),
        *([("now", {})] if source.random() < 0.5 else []),
    ]
    return f"{words[2]} " + fmt.write(calls, TOOLS) + (f" {words[3]}" if source.random() < 0.5 else "")


def mutated(text: str, markers: Sequence[str], source: random.Random) -> str:
    """`text` with up to four things wrong with it: cut, missing, doubled, swapped, or a marker too much."""
    bits = [*markers, *(m[:-1] for m in markers), '"', "{", "}", "[", "]", ",", ":", "\\", "\n", "\0", "null", "<"]
    for _ in range(source.randint(1, 4)):
        a, b = sorted((source.randint(0, len(text)), source.randint(0, len(text))))
        kind = source.randrange(6)
        if kind == 0:
            text = text[:b]
        elif kind == 1:
            text = text[:a] + text[min(b, a + 8) :]
        elif kind == 2:
            text = text[:b] + text[a:]
        elif kind == 3:
            text = text[:a] + source.choice(bits) + text[a:]
        elif kind == 4:
            text = text[:a] + chr(source.choice((32, 60, 124, 125, 0x20AC, 0x1F600))) + text[a + 1 :]
        else:
            text = text[:a] + text[b:] + text[a:b]
    return text[:2000]


def words_in(text: str) -> set[str]:
    return set(_WORD.findall(text))
