"""What `auto` finds in the chat templates of released models."""

from __future__ import annotations

from pathlib import Path

import pytest
from lmkit.plugins.host import PluginHost
from lmkit.plugins.switches import Switches

TEMPLATES = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "chat_templates"
HOST = PluginHost(switches=Switches())
TOOLS = {
    "ByteDance-Seed-OSS": "seed_oss",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "cohere_command",
    "GLM-4.6": "glm45",
    "LFM2-8B-A1B": "lfm2",
    "MiniMax-M2": "minimax_m2",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen3_coder",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek_v3",
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3_json",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "moonshotai-Kimi-K2": "kimi_k2",
    "openai-gpt-oss-120b": "openai",
    "tool_chat_template_deepseekv31": "deepseek_v31",
    "tool_chat_template_hermes": "hermes",
    "tool_chat_template_llama3.1_json": "llama3_json",
    "tool_chat_template_llama4_pythonic": "llama4_pythonic",
    "tool_chat_template_mistral3": "mistral",
    "tool_chat_template_qwen3coder": "qwen3_coder",
    "unsloth-mistral-Devstral-Small-2507": "mistral",
}
# no calls in the template; the model's name has to say it
NOTHING = {
    "HuggingFaceTB-SmolLM3-3B",
    "deepseek-ai-DeepSeek-V3.1",
    "google-gemma-2-2b-it",
    "microsoft-Phi-3.5-mini-instruct",
}
REASONING = {
    "ByteDance-Seed-OSS": "seed_oss",
    "GLM-4.6": "glm45",
    "MiniMax-M2": "minimax_m2",
    "Qwen-Qwen3-0.6B": "think",
    "openai-gpt-oss-120b": "openai_gptoss",
}


def found(kind: str, template: str) -> list[str]:
    file = TEMPLATES / f"{template}.jinja"
    if not file.is_file():
        pytest.skip("chat templates are not beside the repository (../shared/data/chat_templates)")
    text = file.read_text(encoding="utf-8")
    specs = [HOST.load(kind, name) for name in HOST.names(kind)]
    return [spec.name for spec in specs if any(marker in text for marker in spec.markers)]


@pytest.mark.parametrize("template", [*TOOLS, *sorted(NOTHING)])
def test_tool_format_of_a_template(template: str) -> None:
    assert found("tool_parser", template) == ([TOOLS[template]] if template in TOOLS else [])


@pytest.mark.parametrize("template", REASONING)
def test_reasoning_format_of_a_template(template: str) -> None:
    """Where several match, the first by name is taken: `think` knows the tags only."""
    assert found("reasoning_parser", template)[0] == REASONING[template]
