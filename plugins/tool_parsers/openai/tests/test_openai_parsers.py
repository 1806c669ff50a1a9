"""Harmony: conformance, headers good and bad, streaming, and rendering that equals the reference's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lmkit.api import Grammar, Reasoning, Text, ToolArgs, ToolDef, ToolStart
from lmkit.text.constrain import answer_of, thinking_of
from lmkit.text.formats import in_order, start_parser
from lmkit_formats import ChannelFormat
from lmkit_testing import ReasoningParserConformance, ToolParserConformance
from lmkit_testing.parsers import check_splits, parse
from lmkit_tool_parser_openai.formats import CALLS, REASONING
from lmkit_tool_parser_openai.render import JSON, Message, call, developer_text, namespace, render, system_text

DATA = Path(__file__).resolve().parents[4].parent / "shared" / "data" / "harmony"
PROMPT = "<|end|><|start|>assistant"
SAMPLES = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json"
    '<|message|>{"a": 1}<|call|>',
    '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "<|channel|>"}<|call|>',
    "<|channel|>final<|message|>Hello.<|return|>",
)


class TestOpenai(ToolParserConformance):
    plugin = "tool_parser:openai"
    samples = SAMPLES
    prompt_tails = ("", PROMPT)
    skip = {"test_no_tool_call_is_lost": "a message of another channel is content without its header"}


class TestOpenaiGptoss(ReasoningParserConformance):
    plugin = "reasoning_parser:openai_gptoss"
    samples = ("plain text", *SAMPLES[2:])
    prompt_tails = ("", PROMPT)
    skip = {"test_nothing_is_lost": "the words of a header belong to its markers"}


@pytest.mark.parametrize(
    "header",
    [
        " to=functions.f<|channel|>commentary <|constrain|>json",
        " to=functions.f<|channel|>commentary json",
        " to=functions.f<|channel|>commentary",
        " to=f<|channel|>commentary<|constrain|>json",
        "<|channel|>commentary to=functions.f <|constrain|>json",
        "<|channel|>commentary to=functions.f<|constrain|>json",
        "<|channel|>analysis to=functions.f code",
        "<|start|>assistant<|channel|>commentary to=functions.f json",
    ],
)
@pytest.mark.parametrize("tail", ["", PROMPT])
def test_headers_of_calls(header: str, tail: str) -> None:
    got = check_splits(CALLS, f'{header}<|message|>{{"a": 1}}<|call|>', tail)
    assert got.calls == [("f", '{"a": 1}')]
    assert (got.content, got.reasoning) == ("", "")


def test_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I will look.<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
        "<|start|>assistant to=functions.g<|channel|>commentary json<|message|> <|call|>"
        "<|start|>f to=assistant<|channel|>commentary<|message|>made up<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    )
    got = check_splits(CALLS, text, PROMPT)
    assert got.reasoning == "One.\nTwo.\nmade up"
    assert got.content == "I will look.\nDone."
    assert got.calls == [("f", '{"a": 1}'), ("g", "{}")]


def test_calls_are_content_where_nobody_asked_for_them() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.f<|channel|>commentary<|message|>{}"
    got = check_splits(REASONING, text, PROMPT)
    assert (got.reasoning, got.calls) == ("Hm.", [])
    assert got.content == "{}"
    assert "to=functions.f" in got.warnings[0].text


def test_an_answer_to_nobody_is_an_answer() -> None:
    for fmt in (CALLS, REASONING):
        for header in (" to=assistant<|channel|>final", "<|channel|>final to=user"):
            got = check_splits(fmt, f"{header}<|message|>Done.<|return|>", PROMPT)
            assert (got.content, got.reasoning) == ("Done.", "")


def test_the_end_of_the_prompt_says_where_the_output_begins() -> None:
    for channel, field in (("analysis", "reasoning"), ("final", "content")):
        tail = f"{PROMPT}<|channel|>{channel}<|message|>What was"
        assert getattr(check_splits(CALLS, " written<|end|>", tail), field) == " written"
    assert (
        check_splits(CALLS, "<|channel|>final<|message|>A", f"{PROMPT}<|channel|>final<|message|>x<|end|>").content
        == "A"
    )


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("Hello, world.", "Hello, world."),
        ("total", "total"),
        ("Hi.<|channel|>final<|message|>A", "Hi.A"),
        ("<|channel|>final", "<|channel|>final"),
        ("<|channel|>final<|end|>A", "<|channel|>final<|end|>A"),
        ("<|channel|>final<|message|>A<|end|>B", "A\nB"),
        ("<|channel|>final<|message|>A<|end|>\n\n<|start|>assistant<|channel|>final<|message|>B", "A\nB"),
        ("<|channel|>final<|message|>A<|start|>assistant<|channel|>final<|message|>B", "A\nB"),
        ("<|channel|>" + "x" * 2000, "<|channel|>" + "x" * 2000),
    ],
)
def test_broken_messages_are_content(text: str, content: str) -> None:
    assert check_splits(CALLS, text, PROMPT).content == content


def test_a_call_is_announced_at_the_end_of_its_header() -> None:
    parser = start_parser(CALLS, PROMPT)
    assert parser.feed(" to=functions.f<|channel|>commentary <|constrain|>json<|message|>{") == []
    start, *fragments = parser.feed('"a": "b')
    assert isinstance(start, ToolStart)
    assert start.name == "f"
    assert fragments == [ToolArgs(0, '{"a": "b')]
    assert parser.feed("cd") == [ToolArgs(0, "cd")]


@pytest.mark.parametrize(
    ("body", "arguments", "content"),  # arguments that do not parse: the call was cut
    [
        ("foo<|call|>", None, " to=functions.f<|channel|>commentary<|message|>foo"),
        ("[1]<|call|>", None, " to=functions.f<|channel|>commentary<|message|>[1]"),
        ('{"a": "b<|call|>', '{"a": "b', ""),
        ('{"a": 1, oops}<|call|>', '{"a": 1, ', "oops}"),
        ('{"a": 1} more<|call|>', '{"a": 1}', "more"),
        ('{"a": 1, "b": 2', '{"a": 1, "b": 2', ""),
        ("", None, " to=functions.f<|channel|>commentary<|message|>"),
        ("<|call|>", "{}", ""),
    ],
)
def test_broken_calls(body: str, arguments: str | None, content: str) -> None:
    got = check_splits(CALLS, f" to=functions.f<|channel|>commentary<|message|>{body}", PROMPT)
    is_whole = (arguments or "").endswith("}")
    assert got.calls == ([("f", arguments)] if arguments and is_whole else [])
    assert got.cut == ([("f", arguments)] if arguments and not is_whole else [])
    assert got.content == content


def test_calls_survive_the_round_trip() -> None:
    calls = [("f", '{"a": 1}'), ("g", '{"b": "\\"<tag>\\u00e9"}')]
    text = render([Message("assistant", "Hm.", "analysis"), *(call(*c) for c in calls)]).removeprefix(
        "<|start|>assistant"
    )
    got = check_splits(CALLS, text, PROMPT)
    assert (got.reasoning, got.calls) == ("Hm.", calls)


def test_with_tools_one_parser_reads_everything() -> None:
    assert in_order(REASONING, CALLS) == [CALLS]
    assert in_order(REASONING, None) == [REASONING]
    got = check_splits([REASONING, CALLS], SAMPLES[0], PROMPT)
    assert (got.reasoning, got.calls, got.content) == ("Hm.", [("f", '{"a": 1}')], "")


def test_constraints_come_after_the_analysis_and_in_their_channel() -> None:
    thinking = thinking_of(REASONING, PROMPT, {})
    assert thinking is not None
    assert (thinking.open, thinking.close) == (("<|channel|>analysis<|message|>",), ("<|end|><|start|>assistant",))
    answer = answer_of(REASONING, Grammar("regex", "[0-9]+"))
    assert answer is not None
    tag = json.loads(answer.source)["format"]
    assert (tag["begin"], tag["content"]["pattern"]) == ("<|channel|>final<|message|>", "[0-9]+")


# ------------------------------------------------------------------------------------------------------- rendering

DATE = "2025-06-28"
ROBOT = Message("developer", developer_text("Answer the user's questions like a robot."))
CAPITAL = Message("user", "What is the capital of the largest country in the world?")
NOTES = """Tool for browsing.
The `cursor` appears in brackets before each browsing display: `[{cursor}]`.
Cite information from the tool using the following format:
`【{cursor}†L{line_start}(-L{line_end})?】`, for example: `【6†L9-L11】` or `【8†L3】`.
Do not quote more than 10 words directly from the tool output.
sources=web (default: web)"""
OPEN_NOTES = """Opens the link `id` from the page indicated by `cursor` starting at line number `loc`, showing `num_lines` lines.
Valid link ids are displayed with the formatting: `【{id}†.*】`.
If `cursor` is not provided, the most recent page is implied.
If `id` is a string, it is treated as a fully qualified URL associated with `source`.
If `loc` is not provided, the viewport will be positioned at the beginning of the document or centered on the most relevant passage, if available.
Use this function without `id` to scroll to a new location of an opened page."""  # noqa: E501
FIND_NOTES = "Finds exact matches of `pattern` in the current page, or the page given by `cursor`."
NUMBER = {"type": "number", "default": -1}
STRING = {"type": "string"}
BROWSER = namespace(
    "browser",
    [
        ToolDef(
            "search",
            "Searches for information related to `query` and displays `topn` results.",
            {
                "type": "object",
                "properties": {"query": STRING, "topn": {"type": "number", "default": 10}, "source": STRING},
                "required": ["query"],
            },
        ),
        ToolDef(
            "open",
            OPEN_NOTES,
            {
                "type": "object",
                "properties": {
                    "id": {"type": ["number", "string"], "default": -1},
                    "cursor": NUMBER,
                    "loc": NUMBER,
                    "num_lines": NUMBER,
                    "view_source": {"type": "boolean", "default": False},
                    "source": STRING,
                },
            },
        ),
        ToolDef(
            "find",
            FIND_NOTES,
            {"type": "object", "properties": {"pattern": STRING, "cursor": NUMBER}, "required": ["pattern"]},
        ),
    ],
    NOTES,
)
PYTHON = """## python

Use this tool to execute Python code in your chain of thought. The code will not be shown to the user. This tool should be used for internal reasoning, but not for code that is intended to be visible to the user (e.g. when creating plots, tables, or files).

When you send a message containing Python code to python, it will be executed in a stateful Jupyter notebook environment. python will respond with the output of the execution or time out after 120.0 seconds. The drive at '/mnt/data' can be used to save and persist user files. Internet access for this session is UNKNOWN. Depends on the cluster."""  # noqa: E501
UNIT = {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"}
FUNCTIONS = [
    ToolDef("get_location", "Gets the location of the user."),
    ToolDef(
        "get_current_weather",
        "Gets the current weather in the provided location.",
        {
            "type": "object",
            "properties": {
                "location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"},
                "format": UNIT,
            },
            "required": ["location"],
        },
    ),
    ToolDef(
        "get_multiple_weathers",
        "Gets the current weather in the provided list of locations.",
        {
            "type": "object",
            "properties": {
                "locations": {
                    "type": "array",
                    "items": STRING,
                    "description": 'List of city and state, e.g. ["San Francisco, CA", "New York, NY"]',
                },
                "format": UNIT,
            },
            "required": ["locations"],
        },
    ),
    ToolDef(
        "kitchensink",
        "A function with various complex schemas.",
        {
            "description": "params object",
            "type": "object",
            "properties": {
                "string": {
                    "type": "string",
                    "title": "STRING",
                    "description": "A string",
                    "examples": ["hello", "world"],
                },
                "string_nullable": {
                    "type": "string",
                    "nullable": True,
                    "description": "A nullable string",
                    "default": "the default",
                },
                "string_enum": {"type": "string", "enum": ["a", "b", "c"]},
                "oneof_string_or_number": {
                    "oneOf": [
                        {"type": "string", "default": "default_string_in_oneof"},
                        {"type": "number", "description": "numbers can happen too"},
                    ],
                    "description": "a oneof",
                    "default": 20,
                },
            },
        },
    ),
]
LOOKUP = ToolDef(
    "lookup_weather",
    "Use this tool to lookup the weather in a given location. Call it with the parameter 'location', can be any "
    "textual description of a location.",
    {"type": "object", "properties": {"location": STRING}, "required": ["location"]},
)


def system(**options: object) -> Message:
    return Message("system", system_text(**options))  # type: ignore[arg-type]


def said(channel: str, content: str) -> Message:
    return Message("assistant", content, channel)


SUM, NEXT = Message("user", "What is 2 + 2?"), Message("user", "What about 9 / 2?")
FINAL_ONLY = ("analysis", "final")
RENDERED = {
    "test_no_tools": [system(date=DATE)],
    "test_browser_tool_only": [system(date=DATE, tools=[BROWSER])],
    "test_browser_and_python_tool": [system(date=DATE, tools=[BROWSER, PYTHON])],
    "test_browser_and_function_tool": [
        system(date=DATE, tools=[BROWSER], has_functions=True),
        Message("developer", developer_text(tools=[LOOKUP])),
    ],
    "test_render_functions_with_parameters": [
        system(date=DATE, effort="high", has_functions=True),
        Message("developer", developer_text("Always respond in riddles", FUNCTIONS)),
        Message("user", "What is the weather like in SF?"),
    ],
    "test_simple_convo": [system(), SUM],
    "test_reasoning_system_message": [system(channels=FINAL_ONLY), SUM],
    "test_reasoning_system_message_no_instruction": [
        system(channels=FINAL_ONLY, effort="high"),
        Message("user", "What is the best place to eat candy in the world?"),
    ],
    "test_reasoning_system_message_with_dates": [
        system(channels=FINAL_ONLY, knowledge_cutoff="2021-01", date="2021-01-01"),
        Message("user", "What is 42 * pi?"),
    ],
    **{
        f"test_simple_convo_{effort}_effort{suffix}": [system(effort=effort), *robot, CAPITAL]
        for effort in ("low", "medium", "high")
        for suffix, robot in (("", [ROBOT]), ("_no_instruction", []))
    },
    "test_dropping_cot_by_default": [
        SUM,
        said("analysis", "User asks: “What is 2 + 2?” Simple arithmetic. Provide answer."),
        said("final", "2 + 2 equals 4."),
        NEXT,
    ],
    "test_does_not_drop_if_ongoing_analysis": [
        Message("user", "What is the weather in SF?"),
        said("analysis", "User asks: “What is the weather in SF?” We need to use lookup_weather tool."),
        call("lookup_weather", '{"location": "San Francisco"}'),
        Message("functions.lookup_weather", '{"temperature": 20, "description": "sunny"}'),
    ],
    "test_preserve_cot": [
        SUM,
        said("analysis", 'User asks a simple question: "What is 2 + 2?" The answer: 4.'),
        said("final", "2 + 2 equals 4."),
        NEXT,
    ],
    "test_keep_analysis_between_finals": [
        SUM,
        said("analysis", "thinking 2+2"),
        said("final", "4"),
        Message("user", "What is 3 + 5?"),
        said("analysis", "thinking 3+5"),
        said("final", "8"),
    ],
}


def reference(name: str) -> str:
    file = DATA / f"{name}.txt"
    if not file.is_file():
        pytest.skip("the recorded conversations are not beside the repository")
    return file.read_text(encoding="utf-8").rstrip("\n")


@pytest.mark.parametrize("name", RENDERED)
def test_rendering_equals_the_reference(name: str) -> None:
    options = {
        "complete": name != "test_keep_analysis_between_finals",
        "keep_analysis": name == "test_preserve_cot",
    }
    assert render(RENDERED[name], **options) == reference(name)


def test_recorded_outputs_are_parsed_and_written_again() -> None:
    text = reference("test_streamable_parser")
    got = check_splits(CALLS, text, PROMPT)
    ((name, arguments),) = got.calls
    assert (name, json.loads(arguments)["topn"]) == ("browser.search", 10)
    assert got.reasoning.endswith('browse to confirm.\n{"result": "https://openai.com/"}')
    code = Message("assistant", arguments, "commentary", "browser.search", "code")
    answer = Message("browser.search", '{"result": "https://openai.com/"}', "commentary", "assistant")
    written = render([said("analysis", got.reasoning.partition("\n{")[0]), code, answer])
    # the recipient stands before the channel when written, after it in the recording
    assert (
        written.removeprefix("<|start|>assistant").replace(
            " to=browser.search<|channel|>commentary", "<|channel|>commentary to=browser.search"
        )
        == text
    )
    assert str(answer) == reference("test_tool_response_parsing").rstrip() + "<|end|>"


def test_every_recorded_conversation_is_used() -> None:
    reference("test_no_tools")
    tokens = {"test_simple_reasoning_response", "test_simple_tool_call"}  # token ids: their vocabulary is not here
    used = {*RENDERED, "test_streamable_parser", "test_tool_response_parsing"}
    assert {p.stem for p in DATA.glob("*.txt")} == used | tokens
    assert JSON == "<|constrain|>json"


def test_parsing_takes_no_tools_from_content() -> None:
    assert parse(CALLS, ["<|channel|>final<|message|>to=functions.f {}"], PROMPT).calls == []


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("fmt", [CALLS, REASONING], ids=lambda fmt: fmt.name)
def test_markers_inside_of_a_constrained_answer_are_text(fmt: ChannelFormat, size: int) -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    answer = '{"a": "<|end|><|start|>assistant<|channel|>final<|message|>x"}'
    texts = [f"{thought}<|channel|>final<|message|>{answer}"]
    if fmt.calls:
        texts.append(f"{thought} to=functions.f<|channel|>commentary json<|message|>{answer}<|call|>")
    for text in texts:
        parser = start_parser(fmt, PROMPT, constrained=True)
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        events = [e for piece in pieces for e in parser.feed(piece)] + parser.flush()
        arguments = "".join(e.json_fragment for e in events if isinstance(e, ToolArgs))
        shown = "".join(e.text for e in events if isinstance(e, Text))
        assert (shown, arguments) == (("", answer) if "to=" in text else (answer, ""))
        assert "".join(e.text for e in events if isinstance(e, Reasoning)) == "Hm."
