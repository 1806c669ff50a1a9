"""Conformance kit of tool and reasoning parsers: the same message however the text is split, in linear time.

    from lmkit_testing import ToolParserConformance

    class TestMine(ToolParserConformance):
        plugin = "tool_parser:mine"
        samples = ("...",)

The checks are functions too, for use without pytest: each raises AssertionError that shows the text and the split.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from lmkit.api import ParseWarning, Reasoning, Text, ToolArgs, ToolCut, ToolDef, ToolEnd, ToolStart
from lmkit.plugins import load_target
from lmkit.text.formats import AnyFormat, Chain, in_order, start_parser
from lmkit_formats import ReasoningFormat, ToolFormat
from lmkit_python.front.message import Message as Fold

from lmkit_testing import outputs
from lmkit_testing.clock import least
from lmkit_testing.specs import PluginConformance, find_plugin

Format = AnyFormat
TOOLS = (ToolDef("f"),)
SECONDS_PER_MEGABYTE = 1.0


@dataclass
class Message:
    """What a client ends up with."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name, arguments as written
    cut: list[tuple[str, str]] = field(default_factory=list)  # the same of calls that the model did not close
    written: list[str] = field(default_factory=list)  # of these, what the model wrote
    ids: list[str] = field(default_factory=list, compare=False)
    warnings: list[ParseWarning] = field(default_factory=list)


def parse(
    formats: Format | Sequence[Format],
    pieces: Iterable[str],
    prompt_tail: str | None = "",
    tools: Sequence[ToolDef] = TOOLS,
    template_kwargs: Mapping[str, object] | None = None,
) -> Message:
    """Feeds the pieces, flushes, and assembles; asserts that the events are well formed."""
    chosen: Sequence[Format] = formats if isinstance(formats, (list, tuple)) else [formats]  # type: ignore[list-item]
    parser = Chain(*(start_parser(f, prompt_tail, tools, template_kwargs) for f in in_order(*chosen)))
    fold = Fold()
    num_arguments = 0  # calls that have begun
    empty = False  # the last of them has no arguments yet
    ended: set[int] = set()
    ids: set[str] = set()
    events = [e for piece in pieces for e in parser.feed(piece)] + parser.flush()
    events += parser.flush()
    for e in events:
        fold.feed([e])
        match e:
            case Text(text):
                assert text, "empty Text event"
            case Reasoning(text):
                assert text, "empty Reasoning event"
            case ToolStart(index, id, name):
                assert index == num_arguments, f"call {index} begins after {num_arguments} calls"
                assert id not in ids, "call ids must be unique"
                assert name, "a call without a name"
                assert len(ended) == index, "a call begins before the previous one ended"
                assert not empty, "a call without arguments: clients take that for an empty object"
                empty = True
                ids.add(id)
                num_arguments += 1
            case ToolArgs(index):
                assert index == num_arguments - 1, "arguments of a call that is not the current one"
                assert index not in ended, "arguments after the end of a call"
                empty = False
            case ToolEnd(index) | ToolCut(index):
                assert index == num_arguments - 1, "the end of a call that is not the current one"
                assert index not in ended, "a call ended twice"
                ended.add(index)
    assert len(ended) == num_arguments, "a call without an end"
    assert not empty, "a call without arguments: clients take that for an empty object"
    for call in fold.calls:
        if call.complete:
            assert isinstance(_loads(call.arguments), dict), f"the arguments are no JSON object: {call}"
        else:
            assert _loads(call.arguments) is None, f"a client would execute a call that was cut: {call}"
            assert call.arguments.startswith("{"), f"arguments of a call that do not begin an object: {call}"
    calls = [(call.name, call.arguments) for call in fold.calls if call.complete]
    cut = [(call.name, call.arguments) for call in fold.calls if not call.complete]
    written = [e.text for e in events if isinstance(e, ToolCut)]
    warnings = [e for e in events if isinstance(e, ParseWarning)]
    return Message(fold.content, fold.reasoning, calls, cut, written, [call.id for call in fold.calls], warnings)


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def check_splits(
    formats: Format | Sequence[Format],
    text: str,
    prompt_tail: str | None = "",
    num_random: int = 20,
    tools: Sequence[ToolDef] = TOOLS,
    template_kwargs: Mapping[str, object] | None = None,
) -> Message:
    """The whole text, every split in two, single characters and random chunkings give one message. Returns it."""

    def run(pieces: list[str]) -> Message:
        return parse(formats, pieces, prompt_tail, tools, template_kwargs)

    whole = run([text])

    def same(pieces: list[str], how: str) -> None:
        got = run(pieces)
        assert got == whole, f"{how}: {text!r}\n  whole {whole}\n  split {got}"

    same(list(text), "one character at a time")
    for at in range(len(text) + 1):
        same([text[:at], text[at:]], f"split at {at}")
    source = random.Random(len(text))
    for _ in range(num_random):
        cuts = sorted(source.randint(0, len(text)) for _ in range(source.randint(1, 12)))
        same([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)], f"cuts {cuts}")
    return whole


def check_cuts(
    formats: Format | Sequence[Format], text: str, prompt_tail: str | None = "", tools: Sequence[ToolDef] = TOOLS
) -> None:
    """Wherever the output is cut: a call of it is the whole one, or none that a client could execute (see `parse`)."""
    whole = parse(formats, [text], prompt_tail, tools)
    for at in range(len(text)):
        got = parse(formats, [text[:at]], prompt_tail, tools)
        assert got.calls == whole.calls[: len(got.calls)], f"cut at {at}: {text!r}\n  whole {whole}\n  cut {got}"
        assert len(got.cut) <= len(whole.cut) + 1, f"cut at {at}: {text!r}\n  {got}"


def check_linear(fmt: Format, markers: Sequence[str], prompt_tail: str | None = "", size: int = 1_000_000) -> None:
    """A megabyte of nasty text takes under a second, whole and in pieces, and twice the text about twice the time."""
    allowed = SECONDS_PER_MEGABYTE * max(size, 200_000) / 1_000_000
    opened = [m + '{"name": "f", "arguments": {"a": "' for m in markers]
    units = [*markers, *(m[:-1] for m in markers if len(m) > 1), *opened[:1], "<", " ", "\n", '"', "\\", "{", "["]
    texts = [_repeated(unit, size) for unit in [*units, '{"name"', '{"name": "f", "arguments": {}}']]
    for text in [*texts, *(_repeated(unit, size, begin) for begin in opened for unit in ("\\", "x", "\\u00"))]:
        whole = least(partial(_seconds, fmt, [text], prompt_tail), min(allowed, 0.2))
        assert whole < allowed, f"{text[:80]!r} ...: {size} characters took {whole:.2f} s in one piece"
        if whole >= 0.2:  # else the clock is too coarse to tell
            half = _seconds(fmt, [text[: size // 2]], prompt_tail)
            assert whole < 4 * half, f"{text[:80]!r} ...: took {whole / half:.1f} times half"
        small = [text[i : i + 3] for i in range(0, size // 10, 3)]
        pieces = least(partial(_seconds, fmt, small, prompt_tail), allowed)
        assert pieces < allowed, f"{text[:80]!r} ...: {size // 10} characters took {pieces:.2f} s in pieces of 3"


def _repeated(unit: str, size: int, begin: str = "") -> str:
    return (begin + unit * (size // len(unit) + 1))[:size]


def _seconds(fmt: Format, pieces: list[str], prompt_tail: str | None) -> float:
    parser = start_parser(fmt, prompt_tail, TOOLS)
    begin = time.process_time()
    for piece in pieces:
        parser.feed(piece)
    parser.flush()
    return time.process_time() - begin


def markers_of(fmt: Format) -> list[str]:
    """The longest first."""
    return sorted(fmt.keep_special, key=lambda m: (-len(m), m))


def without_markers(text: str, fmt: Format) -> list[str]:
    """The words of a text, without the markers of a format."""
    for marker in markers_of(fmt):
        text = text.replace(marker, " ")
    return text.split()


class _ParserConformance(PluginConformance):
    samples: ClassVar[Sequence[str]] = ()  # outputs of the family, good and bad
    prompt_tails: ClassVar[Sequence[str]] = ("",)  # ends of prompts that change what the parser expects
    torch_free_target = True

    def format(self) -> Format:
        target = load_target(find_plugin(self.plugin)[2].target)
        return target() if isinstance(target, type) else target

    @pytest.mark.one_in(3)
    def test_every_split_gives_the_same_message(self) -> None:
        fmt = self.format()
        markers = markers_of(fmt)
        made = ["", " ", "\n", *markers, *(m[:-1] for m in markers), *(a + b for a in markers for b in markers)]
        for tail in self.prompt_tails:
            for text in [*self.samples, *made, *(s[: len(s) // 2] for s in self.samples)]:
                check_splits(fmt, text, tail)

    def test_text_without_markers_is_content(self) -> None:
        plain = "Plain text, < not > a marker."
        assert parse(self.format(), [plain]).content == plain

    @pytest.mark.one_in(6)
    def test_work_is_linear(self) -> None:
        for tail in self.prompt_tails:
            check_linear(self.format(), markers_of(self.format()), tail, size=30_000)

    @pytest.mark.slow
    def test_work_is_linear_in_a_megabyte(self) -> None:
        for tail in self.prompt_tails:
            check_linear(self.format(), markers_of(self.format()), tail)


class ToolParserConformance(_ParserConformance):
    """For kind tool_parser. For a ToolFormat the outputs to try are made from it."""

    num_broken: ClassVar[int] = 150  # broken outputs to try

    def declared(self) -> ToolFormat:
        fmt = self.format()
        if not isinstance(fmt, ToolFormat):
            pytest.skip("the format is not a declaration")
        return fmt

    def test_no_tool_call_is_lost(self) -> None:
        """What is neither content nor reasoning became a call."""
        for sample in self.samples:
            message = check_splits(self.format(), sample)
            lost = without_markers(message.content, self.format()) != without_markers(sample, self.format())
            assert message.calls or message.cut or not lost, sample

    @pytest.mark.one_in(4)
    def test_what_the_family_writes_is_read_back(self) -> None:
        fmt = self.declared()
        for text, calls in outputs.examples(fmt):
            message = check_splits(fmt, text, tools=outputs.TOOLS)
            assert [(name, json.loads(arguments)) for name, arguments in message.calls] == calls, text
            assert (message.content, message.warnings) == ("", []), text

    @pytest.mark.one_in(2)
    def test_a_call_that_is_cut_is_never_executable(self) -> None:
        """Every cut of every output: a stop text, the limit of tokens or the model's own end may come anywhere."""
        fmt = self.format()
        for tail in self.prompt_tails:
            for sample in self.samples:
                check_cuts(fmt, sample, tail)
        if isinstance(fmt, ToolFormat):
            for text, _ in outputs.examples(fmt):
                check_cuts(fmt, text, tools=outputs.TOOLS)

    @pytest.mark.one_in(4)
    def test_broken_outputs_end_well(self) -> None:
        """Arguments are JSON, or a call was cut (see `parse`), no word is lost, and the split does not matter."""
        fmt = self.declared()
        for seed in range(self.num_broken):
            source = random.Random(seed)
            text = outputs.mutated(outputs.with_words(fmt, source), markers_of(fmt), source)
            whole = parse(fmt, [text], tools=outputs.TOOLS)
            size = source.choice((1, 2, 3, 7))
            pieces = parse(fmt, [text[i : i + size] for i in range(0, len(text), size)], tools=outputs.TOOLS)
            assert pieces == whole, f"seed {seed}, pieces of {size}: {text!r}"
            calls = map(str, [*whole.calls, *whole.cut])
            shown = " ".join([whole.content, *calls, *whole.ids, *(w.text for w in whole.warnings)])
            as_text = " ".join([whole.content, *map(str, whole.calls), *whole.written, *whole.ids,
                                *(w.text for w in whole.warnings)])  # fmt: skip
            assert outputs.words_in(text) <= outputs.words_in(as_text), f"seed {seed}: {text!r}\n{whole}"
            assert outputs.words_in(text) <= outputs.words_in(shown), f"seed {seed}: {text!r}\n{whole}"


class ReasoningParserConformance(_ParserConformance):
    """For kind reasoning_parser."""

    def test_nothing_is_lost(self) -> None:
        """Reasoning and content together are the output without its markers."""
        fmt = self.format()
        for sample in self.samples:
            message = check_splits(fmt, sample)
            shown = without_markers(message.reasoning + " " + message.content, fmt)
            assert shown == without_markers(sample, fmt), sample

    def test_a_call_that_is_only_mentioned_is_reasoning(self) -> None:
        """A model may write of calls while it thinks: until it closes its reasoning, all of it is reasoning."""
        fmt = self.format()
        if not isinstance(fmt, ReasoningFormat) or not fmt.until:
            pytest.skip("the format names no texts that begin calls")
        for marker in fmt.until:
            thought = f"I might call {marker} later."
            message = check_splits(fmt, f"{fmt.open[0]}{thought}{fmt.close[0]}Yes.")
            assert (message.reasoning.strip(), message.content) == (thought, "Yes."), marker


@dataclass
class Vector:
    """One recorded model output and what a client must see of it (see shared/data/README.md).

    Where the source's whole and streamed results differ, either may be right. Blanks around the content of a result
    that was only stated for whole outputs do not count: sources strip them there, and cannot while streaming.
    """

    id: str
    text: str
    expected: list[dict[str, Any]]  # one of these
    deltas: list[str]
    asserted: frozenset[str]
    tools: tuple[ToolDef, ...]
    template_kwargs: dict[str, Any]
    weak: str  # the source asserts no more than this of the calls
    streamed: bool  # the expectation holds for streams

    def check(
        self, formats: Format | Sequence[Format], prompt_tail: str | None = None, num_random: int = 200
    ) -> Message:
        """Whole, every split, single characters, random chunkings and the recorded deltas give what is expected."""
        tools, kwargs = self.tools or TOOLS, self.template_kwargs
        got = check_splits(formats, self.text, prompt_tail, num_random, tools, kwargs)
        assert parse(formats, self.deltas, prompt_tail, tools, kwargs) == got, f"{self.id}: the recorded deltas differ"
        problems = [self._problem(got, expected) for expected in self.expected]
        assert "" in problems, f"{self.id}: {problems[0]}; {got}"
        return got

    def _problem(self, got: Message, expected: Mapping[str, Any]) -> str:
        """What is not as expected, or ""."""
        want = [(c["name"], c.get("arguments_json", c.get("arguments"))) for c in expected.get("tool_calls") or ()]
        have = [(name, json.loads(arguments)) for name, arguments in got.calls]
        if "tool_calls" in self.asserted or (want and self.asserted & {"name", "arguments"}):
            if [n for n, _ in have] != [n for n, _ in want]:
                return "other names of calls"
            if not self.weak and [a for _, a in have] != [a or {} for _, a in want]:
                return "other arguments"
            if self.weak == "one call, argument types" and [_types(a) for _, a in have] != [_types(a) for _, a in want]:
                return "other types of arguments"
        for name in self.asserted & {"content", "reasoning"} & expected.keys():
            shown, wanted = getattr(got, name), expected[name] or ""
            if shown != wanted and (self.streamed or shown.strip() != wanted.strip()):
                return f"{name} is not {wanted!r}"
        return ""


def _types(arguments: Mapping[str, Any]) -> dict[str, type]:
    return {key: type(value) for key, value in arguments.items()}


def load_vectors(file: Path) -> list[Vector]:
    """The cases of a vector file."""
    return [_vector(c) for c in json.loads(file.read_text(encoding="utf-8"))["cases"]]


def _vector(case: dict[str, Any]) -> Vector:
    deltas = [d for d in case.get("deltas", []) if d]
    functions = [t.get("function", t) for t in case.get("tools") or ()]
    return Vector(
        case["id"],
        "".join(deltas) or case["model_output"],  # the deltas are what the source has fed
        [case["expected"], *([case["stream_expected"]] if "stream_expected" in case else [])],
        deltas or [case["model_output"]],
        frozenset(case.get("asserted", ())),
        tuple(ToolDef(f["name"], parameters=f.get("parameters") or {}) for f in functions),
        case.get("config", {}).get("chat_template_kwargs") or {},
        case.get("weak", ""),
        "stream" in case["modes"],
    )
