"""What a request asks of its output becomes one grammar: which, and when it is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lmkit.api import Grammar, RequestError, ToolChoice, ToolDef
from lmkit.text.constrain import constraint, thinking_of
from lmkit.text.formats import start_parser
from lmkit_formats import JsonCalls, NamedJson, Params, PyCalls, ReasoningFormat, ToolFormat

HERMES = ToolFormat("hermes", JsonCalls(), open=("<tool_call>",), close=("</tool_call>",), between="\n")
LISTED = ToolFormat("listed", JsonCalls(many="list"), open=("[TOOL_CALLS]",))
NAMED = ToolFormat(
    "named",
    NamedJson(ends=("<args>",), written="functions.{name}:{index}", pattern=r"functions\.(?P<name>\w+):[0-9]+"),
    open=("<call>",),
    close=("</call>",),
    section=("<calls>",),
    section_close=("</calls>",),
)
PARAMS = ToolFormat("params", Params(name_ends=(">",), open="<p=", key_ends=(">",), close="</p>"), open=("<f=",))
THINK = ReasoningFormat("think", ("<think>",), ("</think>",), until=("<tool_call>",), switch=("enable_thinking",))
TOOLS = [ToolDef("f", parameters={"type": "object", "properties": {"a": {"type": "integer"}}}), ToolDef("g")]
REQUIRED = ToolChoice("required")


def tag(grammar: Grammar | None) -> Any:
    assert grammar is not None
    assert grammar.kind == "structural_tag"
    return json.loads(grammar.source)["format"]


def written(fmt: Any, arguments: str = '{"a": 1}') -> list[str]:
    """Texts that a structural format allows, with `arguments` for every schema."""
    match fmt["type"]:
        case "const_string":
            return [fmt["value"]]
        case "json_schema":
            return [arguments]
        case "regex":
            return ["0"]
        case "or":
            return [t for e in fmt["elements"] for t in written(e, arguments)]
        case "sequence":
            texts = [""]
            for element in fmt["elements"]:
                texts = [t + more for t in texts for more in written(element, arguments)]
            return texts
        case "tag":
            return [fmt["begin"] + t + fmt["end"] for t in written(fmt["content"], arguments)]
        case "tags_with_separator":
            one = [t for e in fmt["tags"] for t in written(e, arguments)]
            return one + ([] if fmt["stop_after_first"] else [fmt["separator"].join(one)])
        case "triggered_tags":
            return [t for e in fmt["tags"] for t in written(e, arguments)]
    raise AssertionError(fmt)


@pytest.mark.parametrize("fmt", [HERMES, LISTED, NAMED], ids=lambda f: f.name)
@pytest.mark.parametrize("choice", [REQUIRED, ToolChoice("named", "g")], ids=lambda c: c.mode)
def test_what_the_grammar_writes_the_parser_reads(fmt: ToolFormat, choice: ToolChoice) -> None:
    names = {"f", "g"} if choice.mode == "required" else {"g"}
    seen: set[str] = set()
    for text in written(tag(constraint(None, TOOLS, choice, fmt))):
        parser = start_parser(fmt, "", TOOLS)
        events = parser.feed(text) + parser.flush()
        kinds = {type(e).__name__ for e in events}
        assert kinds <= {"ToolStart", "ToolArgs", "ToolEnd"}, (text, events)
        seen |= {e.name for e in events if type(e).__name__ == "ToolStart"}
        assert {e.json_fragment for e in events if type(e).__name__ == "ToolArgs"} == {'{"a": 1}'}
    assert seen == names


def test_without_parallel_calls_there_is_one() -> None:
    assert tag(constraint(None, TOOLS, REQUIRED, HERMES, parallel=False))["stop_after_first"]
    assert not tag(constraint(None, TOOLS, REQUIRED, HERMES))["stop_after_first"]


def test_auto_is_free_unless_a_tool_is_strict() -> None:
    auto = ToolChoice()
    assert constraint(None, TOOLS, auto, HERMES) is None
    strict = [ToolDef("f", parameters={"type": "object"}, strict=True)]
    found = tag(constraint(None, strict, auto, HERMES))
    assert (found["type"], found["triggers"]) == ("triggered_tags", ["<tool_call>"])
    found = tag(constraint(None, strict, auto, LISTED))
    assert found["tags"][0]["begin"] == "[TOOL_CALLS]["


def test_an_answer_beside_tools_is_an_alternative() -> None:
    answer = Grammar("json_schema", '{"type": "string"}', "mine")
    found = constraint(answer, TOOLS, ToolChoice(), HERMES)
    assert found is not None
    assert found.backend == "mine"
    calls, other = tag(found)["elements"]
    assert calls["type"] == "tags_with_separator"
    assert other == {"type": "json_schema", "json_schema": {"type": "string"}}
    assert constraint(answer, TOOLS, ToolChoice("none"), HERMES) is answer
    assert constraint(answer, [], ToolChoice(), HERMES) is answer
    for kind, source in (("json_object", ""), ("regex", "a"), ("choice", '["a"]')):
        assert tag(constraint(Grammar(kind, source), TOOLS, ToolChoice(), HERMES))["type"] == "or"  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="lark"):
        constraint(Grammar("lark", "start: A"), TOOLS, ToolChoice(), HERMES)


def test_formats_that_cannot_be_constrained_say_so() -> None:
    bare = ToolFormat("bare", PyCalls(), bare="start")
    with pytest.raises(RequestError, match="'bare' cannot be constrained"):
        constraint(None, [ToolDef("f", strict=True)], ToolChoice(), bare)
    dates = {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}
    with pytest.raises(RequestError, match="without pattern and format"):
        constraint(None, [ToolDef("f", parameters=dates, strict=True)], REQUIRED, PARAMS)
    assert constraint(None, [ToolDef("f", parameters=dates)], REQUIRED, PARAMS) is not None


@pytest.mark.parametrize(
    ("tail", "kwargs", "inside", "opens"),
    [
        ("<|assistant|>", {}, False, True),
        ("<|assistant|><think>\n", {}, True, False),
        ("<|assistant|><think>\n\n</think>\n\n", {}, None, None),
        ("<|assistant|>", {"enable_thinking": False}, None, None),
        ("<|assistant|><think>", {"enable_thinking": True}, True, False),
    ],
)
def test_thinking_comes_first_where_it_can_come(tail: str, kwargs: Any, inside: bool | None, opens: bool) -> None:
    found = thinking_of(THINK, tail, kwargs, 7)
    if inside is None:
        assert found is None
        return
    assert found is not None
    assert (found.inside, bool(found.open), found.close, found.budget) == (inside, opens, ("</think>",), 7)


def test_no_reasoning_format_no_thinking() -> None:
    assert thinking_of(None, "<think>", {}) is None
    assert thinking_of(ReasoningFormat("identity", (), ()), "<think>", {}) is None
