"""Real calls, written as each family writes them and as each template shows them in the history, are read back."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from lmkit.api import ToolDef
from lmkit.plugins.host import PluginHost
from lmkit.plugins.switches import Switches
from lmkit.text.formats import load_format
from lmkit_testing.parsers import Message, parse
from lmkit_tokenizer_json.render import Renderer

sys.path.insert(0, str(Path(__file__).parent))
from bfcl import DATA, Question, questions

HOST = PluginHost(switches=Switches())
FORMATS = HOST.names("tool_parser")
QUESTIONS = questions()
TEMPLATES = DATA / "chat_templates"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
needs_bfcl = pytest.mark.skipif(not QUESTIONS, reason="BFCL is not beside the repository (../shared/data/bfcl)")

# Each template and the format that its family writes; what it shows of a call in the history is read back. Not here:
# LFM2's shows no calls, and the Llama 4 one of vLLM shows all arguments as strings.
FAMILIES = {
    "ByteDance-Seed-OSS": "seed_oss",
    "GLM-4.6": "glm45",
    "MiniMax-M2": "minimax_m2",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "qwen3_json",
    "Qwen3-Coder": "qwen3_coder",
    "deepseek-ai-DeepSeek-V3.1": "deepseek_v31",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3_json",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "moonshotai-Kimi-K2": "kimi_k2",
    "openai-gpt-oss-120b": "openai",
    "tool_chat_template_deepseekv31": "deepseek_v31",
    "tool_chat_template_hermes": "hermes",
    "tool_chat_template_llama3.1_json": "llama3_json",
    "tool_chat_template_mistral3": "mistral",
    "tool_chat_template_qwen3coder": "qwen3_coder",
    "unsloth-mistral-Devstral-Small-2507": "mistral",
}


def values(message: Message) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in message.calls]


@needs_bfcl
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.one_in(5)
def test_calls_as_the_family_writes_them(
    name: str, count: Callable[..., None], shortened: Callable[[str], bool]
) -> None:
    fmt = load_format(HOST, "tool_parser", name)
    # a part of them for each format, another for the next
    asked = QUESTIONS[FORMATS.index(name) % 6 :: 6] if shortened(f"tool_parser:{name}") else QUESTIONS
    for i, question in enumerate(asked):
        text = fmt.write(question.calls, question.tools)
        step = i % 13 + 1
        for pieces in ([text], [text[at : at + step] for at in range(0, len(text), step)]):
            got = parse(fmt, pieces, None, question.tools)
            assert values(got) == question.calls, f"{question.id}: {text}"
            assert (got.content, got.reasoning, got.warnings) == ("", "", []), f"{question.id}: {text}"
    count("calls read back, whole and streamed", sum(len(q.calls) for q in asked))


def tool_json(tool: ToolDef) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def history(question: Question, num_calls: int | None) -> list[dict[str, Any]]:
    calls: Sequence[tuple[str, Mapping[str, Any]]] = question.calls[:num_calls]
    shown = [
        {"id": f"call{i:05}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "", "tool_calls": shown}]


@needs_bfcl
@pytest.mark.parametrize("template", FAMILIES)
@pytest.mark.one_in(4)
def test_calls_as_the_template_shows_them(template: str, count: Callable[..., None]) -> None:
    file = TEMPLATES / f"{template}.jinja"
    if not file.is_file():
        pytest.skip("chat templates are not beside the repository (../shared/data/chat_templates)")
    renderer, fmt = (
        Renderer(file.read_text(encoding="utf-8"), SPECIAL),
        load_format(HOST, "tool_parser", FAMILIES[template]),
    )
    single = renderer.findings["parallel tool calls"] != "yes"
    num_read = 0
    for question in QUESTIONS[::8]:
        messages = history(question, 1 if single else None)
        tools = [tool_json(t) for t in question.tools]
        prompt = renderer.render(messages[:1], tools, add_generation_prompt=False)
        text = renderer.render(messages, tools, add_generation_prompt=False).removeprefix(prompt)
        expected = question.calls[:1] if single else question.calls
        got = parse(fmt, [text], "", question.tools)
        assert values(got) == expected, f"{question.id}: {text!r}\n{got}"
        num_read += len(expected)
    count("calls of the history read back", num_read)
