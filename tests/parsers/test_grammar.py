"""With tool_choice "required" the grammar of each format lets a model write real calls as the family writes them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from lmkit.api import Text, ToolChoice, ToolStart
from lmkit.plugins.host import PluginHost
from lmkit.plugins.switches import Switches
from lmkit.text.constrain import constraint
from lmkit.text.formats import load_format, start_parser
from lmkit_formats import ChannelFormat
from lmkit_testing.grammars import byte_vocabulary, generates

sys.path.insert(0, str(Path(__file__).parent))
from bfcl import Question, questions

backend = pytest.importorskip("lmkit_grammar_llguidance.backend", reason="llguidance is not installed")
HOST = PluginHost(switches=Switches())
GRAMMARS = backend.LlGuidance(byte_vocabulary("<|end|>"))


def fits(question: Question) -> bool:
    """Whether the ground truth keeps to the schemas: in BFCL not all of it does."""
    schemas = {t.name: t.parameters for t in question.tools}
    return all(jsonschema.Draft202012Validator(schemas[name]).is_valid(args) for name, args in question.calls)


QUESTIONS = [q for q in questions()[::100] if fits(q)]


@pytest.mark.skipif(not QUESTIONS, reason="BFCL is not beside the repository (../shared/data/bfcl)")
@pytest.mark.parametrize("name", HOST.names("tool_parser"))
@pytest.mark.one_in(5)
def test_real_calls_can_be_generated(name: str, count: Callable[..., None]) -> None:
    fmt = load_format(HOST, "tool_parser", name)
    for question in QUESTIONS:
        calls = question.calls[:1] if isinstance(fmt, ChannelFormat) else question.calls  # one call ends the turn
        grammar = constraint(None, question.tools, ToolChoice("required"), fmt)
        text = fmt.write(calls, question.tools)
        assert generates(GRAMMARS.load(GRAMMARS.compile(grammar)).matcher(), list(text.encode())), text
        parser = start_parser(fmt, "", question.tools, constrained=True)
        events = parser.feed(text) + parser.flush()
        assert [e.name for e in events if isinstance(e, ToolStart)] == [name for name, _ in calls], text
        assert not any(isinstance(e, Text) for e in events), text
        count("calls that the grammar generates", len(calls))
