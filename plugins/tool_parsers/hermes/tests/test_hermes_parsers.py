"""Hermes calls and <think> reasoning: the conformance kit, recorded outputs, and what happens to malformed calls."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from lmkit.api import ToolArgs, ToolStart
from lmkit.text.formats import start_parser
from lmkit_testing import ReasoningParserConformance, ToolParserConformance
from lmkit_testing.parsers import Vector, check_splits, load_vectors, parse
from lmkit_tool_parser_hermes.formats import HERMES, THINK
from lmkit_tool_parser_hermes.hooks import lmkit_reasoning_parsers, lmkit_tool_parsers

DATA = Path(__file__).resolve().parents[4].parent / "shared" / "data"
OPENED = "<|im_start|>assistant\n<think>\n"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
SAMPLES = [
    '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "x</tool_call>y", "c": ["}", {"d": null}]}}\n</tool_call>',
    'Let me see.\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g"}</tool_call> Done.',
    '<tool_call>{"arguments": {"a": "\\"\\u00e9"}, "name": "f"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> after',
    "<tool_call>not json</tool_call> after",
]


def vectors(name: str) -> list[Vector]:
    file = DATA / "parsers" / name
    return load_vectors(file) if file.is_file() else []


class TestHermes(ToolParserConformance):
    plugin = "tool_parser:hermes"
    samples = SAMPLES


class TestThink(ReasoningParserConformance):
    plugin = "reasoning_parser:think"
    samples = ("<think>a</think>b", "\n<think>\na</think>\n\nb", "a</think>b", "<think>a<tool_call>b")
    prompt_tails = ("", OPENED)


@pytest.mark.parametrize("vector", vectors("tool/hermes.json"), ids=lambda v: v.id)
def test_hermes_vectors(vector: Vector) -> None:
    vector.check(HERMES)


@pytest.mark.parametrize("vector", vectors("reasoning/qwen3.json"), ids=lambda v: v.id)
def test_think_vectors(vector: Vector) -> None:
    # the source's template opens the reasoning in the prompt, or closes it at once when thinking is switched off
    vector.check(THINK, CLOSED if vector.template_kwargs.get("enable_thinking") is False else OPENED)


@pytest.mark.parametrize(
    ("file", "open", "close"),
    [
        ("_base_thinking", "<test:think>", "</test:think>"),
        ("_base_thinking_alt", "<alt:start>", "<alt:end>"),
        ("_think_stub", "<think>", "</think>"),
    ],
)
def test_other_markers(file: str, open: str, close: str) -> None:
    """The machine knows no marker by heart."""
    fmt = replace(THINK, open=(open,), close=(close,), until=())
    for vector in vectors(f"reasoning/{file}.json"):
        calls = [expected.pop("tool_calls", None) for expected in vector.expected]
        assert not any(calls), "these vectors are about reasoning only"
        vector.check(fmt, f"assistant\n{open}\n")


def test_vectors_were_found() -> None:
    if not DATA.is_dir():
        pytest.skip(f"recorded outputs are not here: {DATA.name} is missing beside the repository")
    assert len(vectors("tool/hermes.json")) >= 8
    assert len(vectors("reasoning/qwen3.json")) >= 10


def test_reasoning_then_calls() -> None:
    text = '<think>\nshould I use <tool\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    got = check_splits([THINK, HERMES], text)
    assert got.reasoning == "should I use <tool"
    assert got.calls == [("f", '{"a": 1}')]
    assert got.content == ""


def test_without_a_marker_everything_is_content() -> None:
    assert check_splits([THINK, HERMES], "The answer is 4.").content == "The answer is 4."
    assert check_splits(THINK, "I explain <think> and </think>.").content == "I explain <think> and </think>."


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>[{"name": "f"}]</tool_call>',
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        '<tool_call>{"name": "f" "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "argu',
        "<tool_ca",
        " \n<tool_call>oops",
        "text <tool_call></tool_call> more",
    ],
)
def test_a_malformed_head_is_content_and_complete(text: str) -> None:
    got = check_splits(HERMES, text)
    assert got.calls == []
    assert got.content == text


def test_a_marker_at_the_very_end_is_dropped() -> None:
    got = check_splits(HERMES, "Let me see.<tool_call>\n")
    assert (got.content, got.calls) == ("Let me see.", [])
    assert got.warnings


def test_a_call_goes_on_after_a_malformed_one() -> None:
    got = check_splits(HERMES, '<tool_call>oops</tool_call>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    assert got.calls == [("f", "{}")]
    assert got.content == "<tool_call>oops</tool_call>\n"


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        # the outer brace or the closing tag is missing: the arguments are complete, so the call stands
        ('<tool_call>{"name": "f", "arguments": {"a": 1}', '{"a": 1}', ""),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}', '{"a": 1}', ""),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', '{"a": 1}', ""),
        # one brace too many is the model's text
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>', '{"a": 1}', "}</tool_call>"),
        # what can be mended is: a newline inside a string, a backslash that escapes nothing
        ('<tool_call>{"name": "f", "arguments": {"a": "1\n\\d"}}</tool_call>', '{"a": "1\\n\\\\d"}', ""),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "{}", ""),
        ('<tool_call>{"name": "f"}</tool_call>', "{}", ""),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', '{"a": 1}', ""),
    ],
)
def test_imperfect_calls(text: str, arguments: str, content: str) -> None:
    got = check_splits(HERMES, text)
    assert got.calls == [("f", arguments)]
    assert got.content == content


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        # cut by max_tokens, by a stop text or by the model's own end
        ('<tool_call>{"name": "f", "arguments": {"a": "b', '{"a": "b', ""),
        ('<tool_call>{"name": "f", "arguments": {"a": 1, "b": 2', '{"a": 1, "b": 2', ""),
        ('<tool_call>{"name": "f", "arguments": {"a": 1, "b": tru', '{"a": 1, "b": tru', ""),
        ('<tool_call>{"name": "f", "arguments": {"a": 1, "b', '{"a": 1, "b', ""),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\u00', '{"a": "\\u00', ""),
        # wrong inside the arguments, after the call was announced: the rest is content
        ('<tool_call>{"name": "f", "arguments": {"a": </tool_call>!', '{"a": ', "!"),
        # quotes that the model forgot to escape do not end a shorter call
        ('<tool_call>{"name": "f", "arguments": {"a": "say "hi""}}</tool_call>', '{"a": "say "', 'hi""}}'),
    ],
)
def test_a_call_that_breaks_inside_its_arguments_is_cut(text: str, arguments: str, content: str) -> None:
    """Its arguments stay as the model wrote them: nothing is added that makes them parse."""
    got = check_splits(HERMES, text)
    assert (got.calls, got.cut) == ([], [("f", arguments)])
    assert got.content == content
    assert text.startswith("".join(got.written))
    assert "".join(got.written).endswith(arguments)
    assert got.warnings[0].in_call == (not content)


def test_arguments_are_streamed_as_they_come() -> None:
    parser = start_parser(HERMES, "")
    assert parser.feed('<tool_call>{"name": "f", "arguments": ') == []
    start, first = parser.feed('{"a": "')
    assert isinstance(start, ToolStart)
    assert start.name == "f"
    assert first == ToolArgs(0, '{"a": "')
    assert parser.feed("long text") == [ToolArgs(0, "long text")]


@pytest.mark.parametrize("name", ["simple_python", "multiple", "parallel_multiple"])
def test_real_calls_survive_the_round_trip(name: str) -> None:
    """BFCL ground truth, written in this format and parsed back."""
    file = DATA / "bfcl" / f"BFCL_v4_{name}.answers.json"
    if not file.is_file():
        pytest.skip(f"{file.name} is not here")
    for line in file.read_text(encoding="utf-8").splitlines()[:100]:
        truth = [next(iter(c.items())) for c in json.loads(line)["ground_truth"]]
        calls = [(n, {k: v[0] for k, v in a.items()}) for n, a in truth]
        text = "\n".join("<tool_call>\n" + json.dumps({"name": n, "arguments": a}) + "\n</tool_call>" for n, a in calls)
        got = parse(HERMES, [text[i : i + 7] for i in range(0, len(text), 7)])
        assert [(n, json.loads(a)) for n, a in got.calls] == calls
        assert got.content == ""


def test_auto_recognises_templates() -> None:
    """The markers pick JSON calls and leave the XML dialects of other models alone."""
    folder = DATA / "chat_templates"
    if not folder.is_dir():
        pytest.skip("chat templates are not here")
    (tool,), (reasoning,) = lmkit_tool_parsers(), lmkit_reasoning_parsers()

    def matches(spec: object) -> set[str]:
        return {p.stem for p in folder.glob("*.jinja") if any(m in p.read_text(encoding="utf-8") for m in spec.markers)}

    assert matches(tool) == {
        "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
        "tool_chat_template_hermes",
    }  # fmt: skip
    assert {"Qwen-Qwen3-0.6B", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"} <= matches(reasoning)
    assert "Qwen-Qwen2.5-7B-Instruct" not in matches(reasoning)
