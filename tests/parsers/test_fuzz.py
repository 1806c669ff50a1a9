"""Random and mutated outputs: whatever a model writes, every word of it is shown somewhere, and arguments are JSON.

`parse` raises when events are out of order, when the arguments of a call are no JSON object, and when those of a call
that was cut parse. LMKIT_FUZZ sets the number of outputs per format (`nox -s parsers_long`: 100,000).
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from lmkit.api import ToolDef
from lmkit.plugins.host import PluginHost
from lmkit.plugins.switches import Switches
from lmkit.text.formats import load_format
from lmkit_formats import ChannelFormat, ToolFormat
from lmkit_testing.parsers import Message, check_splits, markers_of, parse

CASES = int(os.environ.get("LMKIT_FUZZ", "500"))
HOST = PluginHost(switches=Switches())
FORMATS = [(kind, name) for kind in ("tool_parser", "reasoning_parser") for name in HOST.names(kind)]
TOOLS = (
    ToolDef("get_time", "", {"type": "object", "properties": {"zone": {"type": "string"}, "n": {"type": "integer"}}}),
    ToolDef("f", "", {"type": "object", "properties": {"a": {"type": "array"}, "b": {}}}),
)
LONG = "y" * 300  # more than a name may have
BITS = (
    "{", "}", "[", "]", '"', "'", "\\", ",", ":", "=", "(", ")", "<", ">", "|", "\n", " ", "\t", "</", "```", "null",
    "-1.5e3", "é", "日本", "\U0001f600", "\u0000", "\ud800", LONG, '{"name": "f", "arguments": {}}', "f(a=1)",
)  # fmt: skip
WORD = re.compile(r"w\d+x")


class Outputs:
    """Outputs of one format: calls as it writes them, texts, its markers, and what happens to them."""

    def __init__(self, fmt: Any, seed: str) -> None:
        self.fmt, self.random = fmt, random.Random(seed)
        self.markers = markers_of(fmt)
        self._count = 0

    def word(self) -> str:
        """A word that stands nowhere else."""
        self._count += 1
        return f"w{self._count}x"

    def next(self) -> str:
        text = "".join(self._part() for _ in range(self.random.randint(1, 6)))
        for _ in range(self.random.choice((0, 0, 1, 2, 4))):
            text = self._mutate(text)
        return text

    def _part(self) -> str:
        choice = self.random.random()
        if choice < 0.4 and isinstance(self.fmt, ToolFormat | ChannelFormat):
            return self.fmt.write([self._call() for _ in range(self.random.randint(1, 3))], TOOLS)
        if choice < 0.6:
            return self.random.choice(self.markers or [" "])
        return self.word() + self.random.choice(BITS) + (self.word() if choice < 0.8 else "")

    def _call(self) -> tuple[str, dict[str, Any]]:
        values = [self.word(), 7, None, True, 1.5, [self.word()], {"k": self.word()}, f"<{self.word()}> \"'\\\n"]
        keys = self.random.sample(("zone", "n", "a", "b"), self.random.randint(0, 4))
        return self.random.choice(("get_time", "f", "other.tool")), {k: self.random.choice(values) for k in keys}

    def _mutate(self, text: str) -> str:
        at, end = sorted(self.random.randint(0, len(text)) for _ in range(2))
        match self.random.randint(0, 5):
            case 0:
                return text[:at]  # cut off
            case 1:
                return text[:at] + text[min(end, at + 8) :]  # something is missing
            case 2:
                return text[:at] + self.random.choice(BITS) + text[at:]
            case 3:
                return text[:at] + self.random.choice(self.markers or BITS) + text[at:]
            case 4:
                return text[:at] + self.word() + text[at:]
        return text[end:] + text[:at]

    def pieces(self, text: str) -> list[str]:
        """Cut at some places, or at every character of a short stretch."""
        size = len(text)
        at = self.random.randint(0, size)
        cuts = sorted(self.random.randint(0, size) for _ in range(self.random.choice((0, 1, 2, 4, 8))))
        cuts = cuts or list(range(at, min(at + 16, size)))
        return [text[a:b] for a, b in pairwise([0, *cuts, size])]


def shown(message: Message, *, as_text: bool = False) -> str:
    """All that a client or an operator can see. `as_text`: where calls that were cut are told as text."""
    calls = [part for call in message.calls for part in call]
    calls += message.written if as_text else [part for call in message.cut for part in call]
    warnings = [part for warning in message.warnings for part in (warning.message, warning.text)]
    return "\n".join([message.content, message.reasoning, *calls, *message.ids, *warnings])


@pytest.mark.parametrize(("kind", "name"), FORMATS)
@pytest.mark.one_in(4)
def test_nothing_is_lost_and_arguments_are_json(
    kind: str, name: str, count: Callable[..., None], shortened: Callable[[str], bool]
) -> None:
    outputs = Outputs(load_format(HOST, kind, name), f"{kind}:{name}")
    cases = CASES // 5 if shortened(f"{kind}:{name}") else CASES
    for _ in range(cases):
        text = outputs.next()
        whole = parse(outputs.fmt, [text], None, TOOLS)
        assert parse(outputs.fmt, outputs.pieces(text), None, TOOLS) == whole, f"split: {text!r}"
        for as_text in (False, True):
            lost = set(WORD.findall(text)) - set(WORD.findall(shown(whole, as_text=as_text)))
            assert not lost, f"{sorted(lost)} of {text!r}\n{whole}"
    count("random outputs, whole and in pieces", cases)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cohere_command", f'<|START_ACTION|>[{{"tool_call_id": "w1x{LONG}", "tool_name": "f", "parameters": {{}}}}]'),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]w1x[CALL_ID]w2x[ARGS]{"a": 1}'),
        ("olmo3", '<function_calls>f(a=1), w1x=["w2x"])</function_calls>'),
        ("llama4_json", '{"name": 1{"name": {"name": "f", "arguments": {"a": "w1x"}}}'),
    ],
)  # fmt: skip
def test_what_was_found_before(name: str, text: str) -> None:
    whole = check_splits(load_format(HOST, "tool_parser", name), text, None, tools=TOOLS)
    assert set(WORD.findall(text)) <= set(WORD.findall(shown(whole))), whole
