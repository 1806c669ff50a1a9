"""OutputStream: streamed and whole agree (T4), stop strings, usage, logprobs that line up with the text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lmkit.api import (
    ErrorInfo,
    PluginError,
    Reasoning,
    SamplingParams,
    Text,
    TokenEvent,
    TokenLogprob,
    ToolArgs,
    ToolCut,
    ToolDef,
    ToolEnd,
    ToolStart,
)
from lmkit.text.side import TextSide
from lmkit.text.stream import Finish, Logprobs, OutputEvent
from lmkit_testing.serving import CALLS, THINK
from lmkit_tokenizer_json.tokenizer import JsonTokenizer

CALM = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture(scope="session")
def side(byte_level: JsonTokenizer) -> TextSide:
    return TextSide(byte_level, None, CALLS, THINK, {})


def feed(side: TextSide, text: str, sizes: list[int] | None = None, finish: str = "stop", tail: str = "",
         **params: object) -> tuple[list[OutputEvent], object]:  # fmt: skip
    """The events of a scripted answer that arrives in steps of `sizes` tokens."""
    ids = side.tokenizer.encode(text, add_special=False)
    stream = side.output_stream(SamplingParams(**params), tail, [ToolDef("f")], prompt_ids=range(7))  # type: ignore[arg-type]
    events: list[OutputEvent] = []
    at, sizes = 0, list(sizes or [1])
    while at < len(ids):
        size = max(1, sizes[at % len(sizes)])
        part = ids[at : at + size]
        at += size
        last = at >= len(ids)
        logprobs = [TokenLogprob(t, -0.5, 1, []) for t in part] if stream.params.logprobs is not None else []
        events += stream.feed(TokenEvent("r", part, finish if last else None, logprobs=logprobs))  # type: ignore[arg-type]
    return events, stream


def text_of(events: list[OutputEvent], kind: type = Text) -> str:
    return "".join(e.text for e in events if isinstance(e, kind))


ANSWERS = st.lists(
    st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": 1}}',
                     "é😀", " ", "\n", "text", "<", "STOP", "ST"]),
    max_size=8,
).map("".join)  # fmt: skip


@CALM
@given(ANSWERS, st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from([(), ("STOP",), ("\n", "xt")]))
def test_steps_of_any_size_give_the_same(side: TextSide, answer: str, sizes: list[int], stop: tuple[str, ...]) -> None:
    """As with drafts: a step may bring several tokens."""
    if not answer:
        return
    one, first = feed(side, answer, stop=stop)
    many, second = feed(side, answer, sizes, stop=stop)
    for kind in (Text, Reasoning):
        assert text_of(one, kind) == text_of(many, kind)
    assert "".join(e.json_fragment for e in one if isinstance(e, ToolArgs)) == "".join(
        e.json_fragment for e in many if isinstance(e, ToolArgs)
    )
    assert one[-1] == many[-1]
    assert first.token_ids == second.token_ids  # type: ignore[attr-defined]
    assert sum(isinstance(e, Finish) for e in one) == 1


def test_stop_string(side: TextSide) -> None:
    ids = side.tokenizer.encode("one STOP two")
    stream = side.output_stream(SamplingParams(stop=("STOP",)), parse=False)
    events = stream.feed(TokenEvent("r", ids))
    assert text_of(events) == "one "
    assert events[-1] == Finish("stop", "STOP", stream.usage)
    assert stream.usage.completion_tokens == len("one STOP")
    assert stream.must_abort
    assert stream.feed(TokenEvent("r", ids, "length")) == []


def test_stop_strings_wait_for_min_tokens(side: TextSide) -> None:
    ids = side.tokenizer.encode("aXbXc")
    stream = side.output_stream(SamplingParams(stop=("X",), min_tokens=3), parse=False)
    events = stream.feed(TokenEvent("r", ids, "length"))
    assert text_of(events) == "aXb"
    assert events[-1].reason == "stop"  # type: ignore[union-attr]


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("asked", [True, False])
def test_stop_token(side: TextSide, include: bool, asked: bool) -> None:
    """The model's own end is no stop of the client's."""
    end = side.tokenizer.id_of("<|end|>")
    stop_ids = (end or 0,) if asked else ()
    stream = side.output_stream(
        SamplingParams(logprobs=0, stop_token_ids=stop_ids), parse=False, include_stop=include, skip_special=False
    )
    logprobs = [TokenLogprob(t, -1.0, 1, []) for t in (*side.tokenizer.encode("ab"), end or 0)]
    events = stream.feed(TokenEvent("r", [*side.tokenizer.encode("ab"), end or 0], "stop", end, logprobs))
    assert text_of(events) == ("ab<|end|>" if include else "ab")
    assert events[-1].stop == (end if asked else None)  # type: ignore[union-attr]
    assert events[-1].end_token == end  # type: ignore[union-attr]
    assert stream.usage.completion_tokens == 3
    assert sum(len(e.entries) for e in events if isinstance(e, Logprobs)) == (3 if include else 2)


@CALM
@given(st.text("ab é😀STOP", min_size=1, max_size=20), st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_logprobs_line_up(side: TextSide, answer: str, sizes: list[int]) -> None:
    """The pieces of the tokens join to the text; offsets point into it."""
    events, _ = feed(side, answer, sizes, logprobs=0, stop=("STOP",))
    entries = [(e, at) for x in events if isinstance(x, Logprobs) for e, at in zip(x.entries, x.offsets, strict=True)]
    text = text_of(events)
    if not text.strip():
        return  # blanks before anything else are held back by the parsers
    assert b"".join(side.tokenizer.piece(e.token) for e, _ in entries) == text.encode()
    done = b""
    for entry, at in entries:
        assert len(done.decode(errors="ignore")) == at
        done += side.tokenizer.piece(entry.token)


THOUGHT = "<think>… Question: …</think>The answer: forty-two. Question: next?"
CALL_THEN_TEXT = '<tool_call>{"name": "f", "arguments": {"a": "x STOP y"}}</tool_call>Done STOP now'


@pytest.mark.parametrize("sizes", [[1], [5], [999]])
def test_stop_strings_are_about_the_visible_answer(side: TextSide, sizes: list[int]) -> None:
    events, _ = feed(side, THOUGHT, sizes, stop=("Question:",))
    assert (text_of(events, Reasoning), text_of(events)) == ("… Question: …", "The answer: forty-two. ")
    assert (events[-1].reason, events[-1].stop) == ("stop", "Question:")  # type: ignore[union-attr]
    events, _ = feed(side, CALL_THEN_TEXT, sizes, stop=("STOP",))
    assert "".join(e.json_fragment for e in events if isinstance(e, ToolArgs)) == '{"a": "x STOP y"}'
    assert text_of(events) == "Done "
    events, _ = feed(side, CALL_THEN_TEXT, sizes, stop=("<tool_call>", "arguments"))
    assert text_of(events) == "Done STOP now"
    assert events[-1].stop is None  # type: ignore[union-attr]


@pytest.mark.parametrize("sizes", [[1], [5], [999]])
def test_stop_strings_are_looked_for_in_the_raw_output_on_demand(side: TextSide, sizes: list[int]) -> None:
    events, _ = feed(side, THOUGHT, sizes, stop=("Question:",), stop_in="output")
    assert (text_of(events, Reasoning), text_of(events)) == ("… ", "")
    events, _ = feed(side, CALL_THEN_TEXT, sizes, stop=("STOP",), stop_in="output")
    assert "".join(e.json_fragment for e in events if isinstance(e, ToolArgs)) == '{"a": "x '
    assert isinstance(next(e for e in events if isinstance(e, (ToolCut, ToolEnd))), ToolCut)
    finish = events[-1]
    assert isinstance(finish, Finish)
    assert (finish.reason, finish.stop, finish.cut_call) == ("stop", "STOP", True)
    events, _ = feed(side, CALL_THEN_TEXT, sizes, stop=("<tool_call>",), stop_in="output")
    assert events == [events[-1]]


def test_logprobs_without_parsers_line_up_with_a_stop_string_held_back(side: TextSide) -> None:
    ids = side.tokenizer.encode("aST bSTOP")
    stream = side.output_stream(SamplingParams(logprobs=0, stop=("STOP",)), parse=False)
    entries = [TokenLogprob(t, -0.5, 1, []) for t in ids]
    events = [
        e for t, entry in zip(ids, entries, strict=True) for e in stream.feed(TokenEvent("r", [t], None, None, [entry]))
    ]
    offsets = [at for e in events if isinstance(e, Logprobs) for at in e.offsets]
    assert (text_of(events), offsets) == ("aST b", [0, 1, 2, 3, 4])


def test_a_stop_string_does_not_go_across_a_call(side: TextSide) -> None:
    events, _ = feed(side, 'ST<tool_call>{"name": "f"}</tool_call>OP', stop=("STOP",))
    assert text_of(events) == "STOP"


@pytest.mark.parametrize("parse", [True, False])
@pytest.mark.parametrize(("min_tokens", "shown", "stop"), [
    (4, "alpha beta ", "gamma delta"),  # begins before the border, and is complete behind it
    (5, "alpha beta ", "gamma delta"),
    (6, "alpha beta gamma delta gamma ", None),
])  # fmt: skip
def test_a_stop_string_across_the_border_of_min_tokens(
    side: TextSide, parse: bool, min_tokens: int, shown: str, stop: str | None
) -> None:
    pieces = ["alpha", " beta", " gam", "ma d", "elta", " gamma "]
    params = SamplingParams(stop=("gamma delta",), min_tokens=min_tokens)
    stream = side.output_stream(params, "", [ToolDef("f")] if parse else [], parse=parse)
    texts = iter(pieces)
    stream.detokenizer = Scripted(texts)  # type: ignore[assignment]
    events = [e for i in range(len(pieces)) for e in stream.feed(TokenEvent("r", [1], "length" if i == 5 else None))]
    assert text_of(events) == shown
    assert events[-1].stop == stop  # type: ignore[union-attr]


class Scripted:
    """A detokenizer with a given piece of text for each token."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self._pieces = pieces

    def feed(self, token: int) -> str:
        return next(self._pieces)

    def flush(self) -> str:
        return ""


def test_a_call_that_is_cut_says_so(side: TextSide) -> None:
    """At every place, with the calls as they come and with whole ones alone."""
    for at in range(len(CALL_THEN_TEXT)):
        written = CALL_THEN_TEXT[:at]
        events, _ = feed(side, written + " ", finish="length")
        ended = any(isinstance(e, ToolEnd) for e in events)
        finish = events[-1]
        assert isinstance(finish, Finish)
        begun = len(written) > len("<tool_call>")
        assert finish.cut_call == (begun and not ended), written
        ids = side.tokenizer.encode(written, add_special=False)
        stream = side.output_stream(SamplingParams(), "", [ToolDef("f")], whole_calls=True)
        held = [e for t in ids for e in stream.feed(TokenEvent("r", [t]))] + stream.feed(TokenEvent("r", [], "length"))
        assert any(isinstance(e, ToolStart) for e in held) == ended, written
        assert not any(isinstance(e, ToolCut) for e in held)
        if finish.cut_call:
            assert text_of(held) == written


def test_usage(side: TextSide) -> None:
    answer = "<think>abc</think>yes"
    stream = side.output_stream(SamplingParams(), prompt_ids=range(5))
    ids = side.tokenizer.encode(answer)
    for i, token in enumerate(ids):
        stream.feed(TokenEvent("r", [token], "length" if i == len(ids) - 1 else None, num_cached=4 if i == 0 else None))
    assert stream.usage.prompt_tokens == 5
    assert stream.usage.cached_tokens == 4
    assert stream.usage.completion_tokens == len(answer)
    assert len("abc") <= stream.usage.reasoning_tokens <= len("<think>abc</think>")


def test_reasoning_opened_by_the_prompt(side: TextSide) -> None:
    events, _ = feed(side, "abc</think>yes", tail="assistant\n<think>\n")
    assert (text_of(events, Reasoning), text_of(events)) == ("abc", "yes")
    assert side.prompt_tail("...<think>\nso far", "<think>\nso far") == "<think>"
    assert side.prompt_tail("...x</think>y", "<think>x</think>y") == "...x</think>y"


def test_errors_end_the_stream(side: TextSide) -> None:
    stream = side.output_stream(SamplingParams())
    error = ErrorInfo("engine-dead", "gone")
    assert text_of(stream.feed(TokenEvent("r", side.tokenizer.encode("a<tool")))) == "a<tool"
    events = stream.fail(error)
    assert events[-1] == Finish("error", None, stream.usage, error)
    assert stream.fail(error) == []


def test_without_tools_calls_are_text(side: TextSide) -> None:
    stream = side.output_stream(SamplingParams())
    answer = '<tool_call>{"name": "f"}</tool_call>'
    events = stream.feed(TokenEvent("r", side.tokenizer.encode("x") + side.tokenizer.encode(answer), "stop"))
    assert text_of(events).startswith("x")


class Broken:
    """A plugin's format whose parser does `returned` with what it is fed."""

    name = "broken"
    keep_special: frozenset[str] = frozenset()

    def __init__(self, returned: object, at: str = "feed") -> None:
        self.returned, self.at = returned, at

    def start(self, prompt_tail: str, tools: object) -> object:
        return self.returned if self.at == "start" else self

    def feed(self, text: str, ids: object = ()) -> object:
        return self._give([Text(text)]) if self.at == "feed" else [Text(text)]

    def flush(self) -> object:
        return self._give([]) if self.at == "flush" else []

    def _give(self, good: object) -> object:
        return self.returned


@pytest.mark.parametrize("returned", [["text"], "text", None, [None], [Text(7)], 7, {"a": 1}])  # type: ignore[arg-type]
@pytest.mark.parametrize("at", ["feed", "flush"])
def test_a_plugins_parser_that_returns_no_events_ends_the_choice(
    byte_level: JsonTokenizer, returned: object, at: str
) -> None:
    side = TextSide(byte_level, None, Broken(returned, at), None, {})  # type: ignore[arg-type]
    events, stream = feed(side, "Hello there")
    assert isinstance(events[-1], Finish)
    assert events[-1].reason == "error"
    assert events[-1].error is not None
    assert events[-1].error.code == "plugin"
    assert "'broken'" in events[-1].error.message
    assert stream.finished  # type: ignore[attr-defined]
    assert stream.must_abort == (at == "feed")  # type: ignore[attr-defined]
    assert text_of(events) == ("" if at == "feed" else "Hello there")


@pytest.mark.parametrize("returned", [None, "text", object()])
def test_a_plugins_parser_that_does_not_start_is_an_error(byte_level: JsonTokenizer, returned: object) -> None:
    side = TextSide(byte_level, None, Broken(returned, "start"), None, {})  # type: ignore[arg-type]
    with pytest.raises(PluginError, match="'broken'"):
        side.output_stream(SamplingParams(), "", [ToolDef("f")])
