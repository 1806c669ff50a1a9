"""What the parsers cost per token: a long answer in each format, as it arrives in deltas of 1 and of 100 tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from time import perf_counter
from typing import TYPE_CHECKING

from lmkit.api import DeclaredFormat, ToolDef
from lmkit.text.formats import AnyFormat, load_format, start_parser

if TYPE_CHECKING:
    from lmkit.plugins.host import PluginHost

DELTAS = (1, 100)  # tokens
NUM_TOKENS = 4000
_TOKEN = re.compile(r" ?\w{1,5}|\s+|[^\w\s]{1,2}")  # about the size of real ones in English and in JSON
_PROSE = "The tower stands 330 metres tall, about as high as a building of 81 storeys; its base is a square. "
TOOLS = (
    ToolDef("write_file", "", {
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}, "lines": {"type": "integer"},
                       "tags": {"type": "array", "items": {"type": "string"}}},
    }),
)  # fmt: skip
CALL = ("write_file", {"path": "/tmp/notes.md", "content": _PROSE * 6, "lines": 12, "tags": ["travel", "paris"]})


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds per token of each round, by the tokens of a delta."""

    kind: str
    name: str
    seconds: dict[int, list[float]]


def measure_parsers(host: PluginHost, only: str = "*", rounds: int = 5) -> Iterator[Measured]:
    """Every installed format whose name matches `only`."""
    for kind in ("tool_parser", "reasoning_parser"):
        for name in host.names(kind):
            if fnmatch(name, only):
                fmt = load_format(host, kind, name)
                tokens = _TOKEN.findall(answer(fmt))[:NUM_TOKENS]
                yield Measured(kind, name, {size: _time(fmt, tokens, size, rounds) for size in DELTAS})


def answer(fmt: AnyFormat) -> str:
    """Some prose, and much of what the format is about."""
    opened = closed = ""
    if isinstance(fmt, DeclaredFormat):
        if calls := fmt.write([CALL] * 2, TOOLS):
            return (_PROSE * 2 + calls) * 40
        opened, closed = fmt.thought
    return opened + _PROSE * 160 + closed + _PROSE * 160


def _time(fmt: AnyFormat, tokens: Sequence[str], size: int, rounds: int) -> list[float]:
    deltas = ["".join(tokens[at : at + size]) for at in range(0, len(tokens), size)]
    samples = []
    for _ in range(rounds + 1):
        parser = start_parser(fmt, None, TOOLS)
        begin = perf_counter()
        for delta in deltas:
            parser.feed(delta)
        parser.flush()
        samples.append((perf_counter() - begin) / len(tokens))
    return samples[1:]  # the first one warms up
