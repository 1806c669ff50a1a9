"""Real chat templates over a battery of conversations: the text is that of `transformers`, and what is found is so."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from lmkit.api import LmkitError
from lmkit.prompts.probe import warnings
from lmkit_tokenizer_json.render import Renderer

DATA = Path(__file__).resolve().parents[5] / "shared" / "data" / "chat_templates"
FILES = sorted(DATA.glob("*.jinja"))
pytestmark = pytest.mark.skipif(not FILES, reason="needs the chat templates of ../shared/data")

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "Hi <there> & \u00e9"}
ANSWER = {"role": "assistant", "content": "Hello."}
SYSTEM = {"role": "system", "content": "Be brief."}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": 'Of "a"', "parameters": PARAMETERS}}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": '{"t": 3}'}
FUNCTION = {"name": "weather", "arguments": {"city": "Paris"}}
CALL = {"role": "assistant", "content": "",
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": FUNCTION}]}  # fmt: skip


def parts(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


BATTERY: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "user": ([USER], {}),
    "system": ([SYSTEM, USER], {}),
    "several turns": ([SYSTEM, USER, ANSWER, USER], {}),
    "two users": ([USER, USER], {}),
    "tools": ([USER], {"tools": [TOOL]}),
    "system and tools": ([SYSTEM, USER], {"tools": [TOOL]}),
    "call": ([USER, CALL], {"tools": [TOOL]}),
    "result": ([USER, CALL, RESULT], {"tools": [TOOL]}),
    "answered": ([USER, CALL, RESULT, ANSWER, USER], {"tools": [TOOL]}),
    "list content": ([parts(SYSTEM), parts(USER)], {}),
    "thinking on": ([USER], {"enable_thinking": True, "thinking": True}),
    "thinking off": ([USER], {"enable_thinking": False, "thinking": False}),
    "reasoning": ([USER, {**ANSWER, "reasoning_content": "hm"}, USER], {}),
    "continued": ([USER, ANSWER], {"continue_final_message": True}),
    "no prompt": ([USER, ANSWER], {"add_generation_prompt": False}),
    "documents": ([USER], {"documents": [{"title": "T", "text": "x"}]}),
}


def expected(source: str, renderer: Renderer, messages: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    """What transformers renders; None when the template refuses. Content is in the form that the template wants."""
    from transformers.utils.chat_template_utils import render_jinja_template

    shaped = [renderer._shape(m) for m in copy.deepcopy(messages)]
    try:
        texts, _ = render_jinja_template([shaped], chat_template=source, **TOKENS, **options)
    except Exception:  # jinja2 and Python errors of the template
        return None
    return texts[0]


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
@pytest.mark.one_in(4)
def test_the_text_is_that_of_transformers(file: Path) -> None:
    source = file.read_text()
    renderer = Renderer(source, TOKENS)
    for name, (messages, given) in BATTERY.items():
        kwargs = {k: v for k, v in given.items() if k in renderer.options}
        options = {"tools": renderer._no_tools, "documents": None, "continue_final_message": False, **given}
        options = {k: v for k, v in options.items() if k in kwargs or k not in ("enable_thinking", "thinking")}
        options.setdefault("add_generation_prompt", not options["continue_final_message"])
        if options["documents"] and not renderer.takes_documents:
            continue
        want = expected(source, renderer, messages, options)
        try:
            got = renderer.render(
                messages, options["tools"] or (), kwargs, add_generation_prompt=options["add_generation_prompt"],
                continue_final_message=options["continue_final_message"], documents=options["documents"] or (),
            )  # fmt: skip
        except LmkitError:
            got = None
        assert got == want, name


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
@pytest.mark.one_in(4)
def test_findings_are_stated_for_every_template(file: Path) -> None:
    found = Renderer(file.read_text(), TOKENS).findings
    assert found["user"] == "yes" or "tool_use" in file.name  # made for requests with tools only
    assert all(text == "yes" or text.startswith("no: ") or name == "thinking switch" for name, text in found.items())


@pytest.mark.parametrize(
    ("name", "finding", "text"),
    [
        ("google-gemma-2-2b-it", "system", "no: the chat template, line"),
        ("google-gemma-2-2b-it", "consecutive users", "no: the chat template, line"),
        ("Qwen-Qwen3-0.6B", "thinking switch", "enable_thinking"),
        ("Qwen-Qwen3-0.6B", "tools", "yes"),
        ("tool_chat_template_deepseekv31", "thinking switch", "thinking"),
        ("microsoft-Phi-3.5-mini-instruct", "tools", "no: it does not read them"),
    ],
)
def test_known_findings(name: str, finding: str, text: str) -> None:
    found = Renderer((DATA / f"{name}.jinja").read_text(), TOKENS).findings
    assert found[finding].startswith(text), found


def test_what_is_worth_a_warning() -> None:
    gemma = Renderer((DATA / "google-gemma-2-2b-it.jinja").read_text(), TOKENS)
    assert any("system" in line for line in warnings(gemma.findings))
    assert warnings(Renderer((DATA / "Qwen-Qwen3-0.6B.jinja").read_text(), TOKENS).findings) == []
