"""`auto` finds the formats of a checkpoint by its chat template, says why not the others, and can be overridden."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lmkit.api import ParserRequest
from lmkit.config import from_options
from lmkit.plugins.host import PluginHost
from lmkit.plugins.resolve import Resolver
from lmkit.plugins.select import consider
from lmkit.plugins.switches import Switches

TEMPLATES = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "chat_templates"
HOST = PluginHost(switches=Switches())
EXPECTED = {  # template: tool parser, reasoning parser
    "ByteDance-Seed-OSS": ("seed_oss", "seed_oss"),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("cohere_command", "cohere"),
    "GLM-4.6": ("glm45", "glm45"),
    "LFM2-8B-A1B": ("lfm2", None),
    "MiniMax-M2": ("minimax_m2", "minimax_m2"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", None),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "think"),
    "Qwen3-Coder": ("qwen3_coder", None),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "deepseek_r1"),
    "google-gemma-2-2b-it": (None, None),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "think"),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", None),
    "microsoft-Phi-3.5-mini-instruct": (None, None),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None),
    "moonshotai-Kimi-K2": ("kimi_k2", None),
    "openai-gpt-oss-120b": ("openai", "openai_gptoss"),
    "tool_chat_template_deepseekv31": ("deepseek_v31", "deepseek_v3"),
    "tool_chat_template_llama4_pythonic": ("llama4_pythonic", None),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", None),
}


def choose(kind: str, template: str = "", architecture: str = "", user: str = "auto") -> str | None:
    request = ParserRequest(kind=kind, model="model", architecture=architecture, chat_template=template)
    outcome = consider(HOST, request, user)
    return outcome.chosen.name if outcome.chosen else None


@pytest.mark.parametrize("name", EXPECTED)
def test_a_template_gives_its_formats_away(name: str) -> None:
    file = TEMPLATES / f"{name}.jinja"
    if not file.is_file():
        pytest.skip("chat templates are not here")
    template = file.read_text(encoding="utf-8")
    assert (choose("tool_parser", template), choose("reasoning_parser", template)) == EXPECTED[name]


def test_an_architecture_gives_them_away_too() -> None:
    assert choose("reasoning_parser", architecture="Qwen3ForCausalLM") == "qwen3"
    assert choose("tool_parser", architecture="InternLM3ForCausalLM") == "internlm"
    assert choose("tool_parser", architecture="DeepseekV32ForCausalLM") == "deepseek_v32"


def test_without_a_sign_there_is_none_but_a_name_is_taken() -> None:
    assert choose("tool_parser", "plain", "PlainForCausalLM") is None
    assert choose("tool_parser", "plain", "PlainForCausalLM", user="granite-20b-fc") == "granite-20b-fc"


QWEN3, LLAMA4 = "Qwen3ForCausalLM", "Llama4ForConditionalGeneration"
HERMES = '<tool_call>\n{"name"'


@pytest.mark.parametrize(
    ("kind", "template", "architecture", "chosen"),
    [
        ("tool_parser", HERMES, LLAMA4, "hermes"),  # tuned to another format
        ("tool_parser", "", LLAMA4, "llama4_pythonic"),
        ("tool_parser", "no marker", LLAMA4, "llama4_pythonic"),
        ("tool_parser", HERMES, "GraniteMoeHybridForCausalLM", "granite4"),  # a family with that format of its own
        ("reasoning_parser", "<think>", QWEN3, "qwen3"),
        ("reasoning_parser", "<｜Assistant｜><think>\\n", QWEN3, "deepseek_r1"),
        ("reasoning_parser", "<think>", "LlamaForCausalLM", "think"),
        ("reasoning_parser", "[THINK]", QWEN3, "mistral"),
    ],
)
def test_the_template_comes_before_the_architecture(kind: str, template: str, architecture: str, chosen: str) -> None:
    assert choose(kind, template, architecture) == chosen


def test_the_checkpoints_own_templates_are_read(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "<think>"}, {"name": "tool_use", "template": "[TOOL_CALLS]"}]
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [QWEN3]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    resolver = Resolver(from_options({"model": str(tmp_path)}), HOST, tolerant=True)
    resolver.run()
    plan = resolver.plan()
    assert [(c.name, c.why) for c in plan.choices if c.kind.endswith("_parser")] == [
        ("mistral", "auto: the chat template has '[TOOL_CALLS]'"),
        ("qwen3", "auto: the model is Qwen3ForCausalLM"),
    ]
