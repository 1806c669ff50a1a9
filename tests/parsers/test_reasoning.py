"""Reasoning that speaks of calls, quotes them, or is never closed; at every split, and as the engine follows it."""

from __future__ import annotations

import json
import time

import pytest
from lmkit.api import Thinking, Vocabulary
from lmkit.plugins.host import PluginHost
from lmkit.plugins.switches import Switches
from lmkit.text.constrain import thinking_of
from lmkit.text.formats import load_format, start_parser
from lmkit_formats import ReasoningFormat
from lmkit_structured_output_masks.channel import Channel, MarkerTable
from lmkit_testing import outputs
from lmkit_testing.clock import least
from lmkit_testing.parsers import Message, check_splits, parse

HOST = PluginHost(switches=Switches())
FORMATS = {name: load_format(HOST, "reasoning_parser", name) for name in HOST.names("reasoning_parser")}
WITH_CALLS = {n: f for n, f in FORMATS.items() if isinstance(f, ReasoningFormat) and f.until}
HERMES = load_format(HOST, "tool_parser", "hermes")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
QWEN3 = FORMATS["qwen3"]
TAIL = "<think>\n"


@pytest.mark.parametrize("name", WITH_CALLS)
def test_a_mention_of_a_call_is_part_of_the_thought(name: str) -> None:
    fmt = WITH_CALLS[name]
    for marker in fmt.until:
        thought = f"I might call {marker} later."
        got = check_splits([fmt], f"{thought}\n{fmt.close[0]}Final answer.", fmt.open[0])
        assert (got.reasoning, got.content) == (thought, "Final answer.")


@pytest.mark.parametrize("name", ["qwen3", "think", "glm45", "nemotron_v3", "mimo"])
@pytest.mark.parametrize("tail", [" so.\n", "\n", ""])
def test_a_quoted_call_is_part_of_the_thought(name: str, tail: str) -> None:
    got = check_splits([FORMATS[name], HERMES], f"Write\n{CALL}{tail}</think>\n\nDone.", TAIL)
    assert (got.reasoning, got.content, got.calls) == (f"Write\n{CALL}{tail}".rstrip(), "Done.", [])


@pytest.mark.parametrize(
    ("text", "reasoning", "num_calls"),
    [
        (f"So\n\n{CALL}", "So\n\n", 1),  # never closed: a model that forgot it
        (f"So {CALL}\n{CALL}\n", "So ", 2),
        (CALL, "", 1),
        (f"use <tool_call> then\n{CALL}", "use <tool_call> then\n", 1),
        (f"use <tool_call> then {CALL}", "use <tool_call> then ", 1),
        (f"use <tool_call>{{...}} then\n{CALL}", "use <tool_call>{...} then\n", 1),
        (f"{CALL} is how", f"{CALL} is how", 0),  # cut off in the thought
        (CALL[:-14], CALL[:-14], 0),  # cut off in a call
        (CALL[:-12], "", 1),  # a whole call, though its end is missing
        (f"{CALL}\n{CALL[:-12]}", "", 2),
        (f"{CALL[:-12]} is it", f"{CALL[:-12]} is it", 0),
        ("I <tool_call>", "I <tool_call>", 0),
        ("I might <tool_call> later.", "I might <tool_call> later.", 0),
        ("\nhm\n\n</think>", "hm", 0),
    ],
)
def test_reasoning_that_is_not_closed_ends_before_whole_calls(text: str, reasoning: str, num_calls: int) -> None:
    got = check_splits([QWEN3, HERMES], text, TAIL)
    assert (got.reasoning, got.content, len(got.calls)) == (reasoning, "", num_calls)


@pytest.mark.parametrize("name", ["hermes", "glm45", "qwen3_coder", "minimax_m2", "seed_oss", "kimi_k2", "gemma4"])
def test_each_family_may_forget_to_close(name: str) -> None:
    fmt, reasoning = load_format(HOST, "tool_parser", name), FORMATS.get(name, QWEN3)
    calls = outputs.examples(fmt)[-1][1]
    assert isinstance(reasoning, ReasoningFormat)
    got = check_splits([reasoning, fmt], f"So\n{fmt.write(calls)}", reasoning.open[0], tools=outputs.TOOLS)
    assert [(n, json.loads(a)) for n, a in got.calls] == calls
    assert (got.reasoning.strip(), got.content) == ("So", "")


def test_reasoning_flows_although_a_call_was_mentioned() -> None:
    """What is held back is a call at most: whatever cannot be one goes out at once."""
    quoted = (CALL, "<tool_call>{...}", '<tool_call>{"name": NAME}', "`<tool_call>`")
    for begin in ("I might <tool_call> later. ", *(f"As in {q}, it is so. " for q in quoted)):
        parser = start_parser(QWEN3, TAIL)
        for c in begin:
            parser.feed(c)
        assert parser.feed("word ")
        assert parser.pending < 32  # type: ignore[attr-defined]


def test_newlines_after_the_marker_are_not_content() -> None:
    for text in ("<think>\nhm\n</think>\n\nHi\n", "<think>hm</think>Hi\n"):
        assert check_splits([FORMATS["think"]], text) == Message("Hi\n", "hm")
    assert parse([FORMATS["think"]], ["\n\nHi"]).content == "\n\nHi"  # there was no reasoning


def test_reasoning_after_text() -> None:
    got = check_splits([FORMATS["mistral"]], "Well. [THINK]hm[/THINK]Yes.")
    assert (got.reasoning, got.content) == ("hm", "Well. Yes.")


@pytest.mark.parametrize(
    "unit", ["<tool_call>", "<tool_call>{", f"{CALL}\n", f"{CALL} ", "\n<tool_call>\n", "\n", CALL[:-1]]
)
def test_work_is_linear(unit: str) -> None:
    def seconds(size: int) -> float:
        parser, text = start_parser(QWEN3, TAIL), unit * (size // len(unit))
        begin = time.process_time()
        for at in range(0, len(text), 16):
            parser.feed(text[at : at + 16])
        parser.flush()
        return time.process_time() - begin

    assert least(lambda: seconds(100_000), 0.5) < 0.5


def test_the_engine_and_the_text_agree_where_the_answer_begins() -> None:
    """Under a grammar the engine keeps markers of calls out of the thinking; text that has them is not cut there."""
    made = thinking_of(QWEN3, TAIL, {})
    assert made == Thinking(("</think>",), (), True, ("<tool_call>",), None)
    pieces = [b"", *(bytes([i]) for i in range(1, 128)), b"</think>", b"<tool_call>", b"hm"]
    table = MarkerTable(made, Vocabulary(pieces, frozenset(), (0,), len(pieces), None), (0,))
    channel = Channel(table, made)
    text = [130, 128]
    assert not (table.allowed(b"")[129 // 32] >> (129 % 32)) & 1
    assert [channel.feed(token) for token in text] == [False, False]
    assert channel.phase == "body"
    parser = start_parser(QWEN3, TAIL, constrained=True)
    for token in text:
        parser.feed(pieces[token].decode())
    assert not parser.inside  # type: ignore[attr-defined]
    unclosed = start_parser(QWEN3, TAIL, constrained=True)
    assert [type(e).__name__ for e in [*unclosed.feed(CALL), *unclosed.flush()]] == ["Reasoning"]


@pytest.mark.parametrize("name", ["hermes", "kimi_k2", "qwen3_coder", "gemma4", "mistral", "lfm2"])
def test_many_blanks_after_a_marker_at_every_split(name: str) -> None:
    """More blanks than are held back elsewhere."""
    fmt = load_format(HOST, "tool_parser", name)
    text = fmt.write([("f", {"a": 1})])
    marker = max((m for m in (*fmt.section, *fmt.open) if m and text.startswith(m.rstrip("[{"))), key=len)  # type: ignore[union-attr]
    begin = len(marker.rstrip("[{"))
    for end in (len(text), begin, begin + 5):
        check_splits(fmt, text[:begin] + "\n" * 70 + text[begin:end], num_random=5)
