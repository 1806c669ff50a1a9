"""A kind of body that the library does not have is a class in the plugin that needs it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmkit.api import ToolChoice, ToolDef
from lmkit.text.constrain import constraint
from lmkit_formats import CallBody, ToolFormat
from lmkit_formats.calls import BodyReader, State
from lmkit_formats.sink import CallSink
from lmkit_testing.parsers import check_splits


@dataclass(frozen=True, slots=True)
class Bang(CallBody):
    """name!argument!"""

    argument: str = "text"

    is_named = True

    @property
    def texts(self) -> tuple[str, ...]:
        return ("!",)

    def reader(self, sink: CallSink, tools: Sequence[ToolDef], ends: Sequence[str], *, strict_keys: bool) -> BodyReader:
        return BangReader(self, sink)

    def frame(self, name: str, index: str) -> tuple[str, str]:
        return f"{name}!", "!"

    def write(self, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
        return str(arguments[self.argument])

    def accept(self, tool: ToolDef) -> dict[str, Any]:
        return {"type": "regex", "pattern": "[^!]*"}


class BangReader:
    def __init__(self, body: Bang, sink: CallSink) -> None:
        self._body, self._sink = body, sink
        self._read = [""]
        self.state: State = "more"

    def feed(self, text: str, at: int, final: bool) -> int:
        while at < len(text) and self.state == "more":
            if text[at] != "!":
                self._read[-1] += text[at]
            elif len(self._read) == 1:
                self._sink.start(self._read[0])
                self._read.append("")
            else:
                self._sink.args(json.dumps({self._body.argument: self._read[1]}))
                self._sink.end()
                self.state = "done"
            at += 1
        return at

    def cut(self) -> str:
        return ""


FORMAT = ToolFormat("bang", Bang(), open=("<call>",), close=("</call>",), between="\n")


def test_it_is_written_parsed_and_constrained_like_those_of_the_library() -> None:
    calls = [("say", {"text": "good day"}), ("say", {"text": ""})]
    written = FORMAT.write(calls)
    assert written == "<call>say!good day!</call>\n<call>say!!</call>"
    got = check_splits(FORMAT, f"So: {written}", tools=[ToolDef("say")])
    assert [(name, json.loads(arguments)) for name, arguments in got.calls] == calls
    assert (got.content, got.warnings) == ("So: ", [])
    assert "!" in FORMAT.keep_special
    grammar = constraint(None, [ToolDef("say")], ToolChoice("required"), FORMAT)
    assert grammar is not None
    assert json.loads(grammar.source)["format"]["tags"] == [
        {"type": "tag", "begin": "<call>say!", "content": {"type": "regex", "pattern": "[^!]*"}, "end": "!</call>"}
    ]


def test_a_call_without_arguments_so_far_is_text_when_it_is_cut_off() -> None:
    """Clients take empty arguments for an empty object."""
    got = check_splits(FORMAT, "<call>say!good", tools=[ToolDef("say")])
    assert (got.calls, got.cut) == ([], [])
    assert got.content == "<call>say!good"
    assert got.warnings
