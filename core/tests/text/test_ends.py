"""Which tokens end an answer: from files, and from what a chat template writes behind a turn and nowhere within one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lmkit.api import Checkpoint
from lmkit.config import EngineConfig
from lmkit.text.ends import find_ends, turn_ends
from lmkit_formats import ReasoningFormat, ToolFormat
from lmkit_testing.serving import CALLS, text_plan
from lmkit_testing.tokenizers import DATA
from lmkit_tokenizer_json.render import Renderer
from msgspec.structs import replace

MARKER = re.compile(r"</?[\w:|\uff5c\u2581.-]{2,40}>|<\|[^<>\s|]{1,30}\|>|\[/?[A-Z_]{3,20}\]|\[e~\[|\]~b\]")
OTHERS = {"<|im_end|>", "<|user|>", "<|observation|>", "<|return|>", "<|call|>", "<|end|>", "<eos>"}
ENDS = {
    "ByteDance-Seed-OSS": {"<seed:eos>"},
    "GLM-4.6": {"<|user|>", "<|observation|>"},
    "MiniMax-M2": {"[e~["},
    "Qwen-Qwen3-0.6B": {"<|im_end|>"},
    "Qwen3-Coder": {"<|im_end|>"},
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": {"<\uff5cend\u2581of\u2581sentence\uff5c>"},
    "deepseek-ai-DeepSeek-V3.1": {"<\uff5cend\u2581of\u2581sentence\uff5c>"},
    "google-gemma-2-2b-it": {"<end_of_turn>"},
    "ibm-granite-granite-3.3-2B-Instruct": {"<|end_of_text|>"},
    "meta-llama-Llama-3.1-8B-Instruct": {"<|eot_id|>", "<|eom_id|>"},
    "microsoft-Phi-3.5-mini-instruct": {"<|end|>"},
    "mistralai-Mistral-Nemo-Instruct-2407": {"<eos>"},
    "moonshotai-Kimi-K2": {"<|im_end|>"},
    "openai-gpt-oss-120b": {"<|return|>", "<|call|>"},
    "tool_chat_template_llama4_pythonic": {"<|eot|>"},
}
R7B = "CohereForAI-c4ai-command-r7b-12-2024-tool_use"


def asked(name: str, known: tuple[str, ...] = ()) -> list[str]:
    file = DATA / "chat_templates" / f"{name}.jinja"
    if not file.is_file():
        pytest.skip("the test material (shared/data) is not beside the repository")
    source = file.read_text(encoding="utf-8")
    renderer = Renderer(source, {"bos_token": "<bos>", "eos_token": "<eos>"})
    return turn_ends(renderer, {*MARKER.findall(source), *OTHERS}, [CALLS], known)


@pytest.mark.parametrize("name", ENDS)
def test_published_templates(name: str) -> None:
    assert set(asked(name)) == ENDS[name]


def test_a_known_end_behind_the_wrapper_of_the_answer_is_enough() -> None:
    assert asked(R7B, ("<|END_OF_TURN_TOKEN|>",)) == ["<|END_OF_TURN_TOKEN|>"]


def turns(behind: str) -> str:
    return "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + behind + "{% endfor %}"


NAMES = ("[user]", "[assistant]", "[tool]", "<end>", "</think>", "<call>", "</call>")


@pytest.mark.parametrize(
    ("source", "formats", "ends"),
    [
        (turns("<end>\n"), (), ["<end>"]),
        (turns(" \n <end>"), (), ["<end>"]),
        (turns(""), (), ["[user]"]),  # the next turn is what ends this one
        (turns(". So long<end>"), (), []),  # text comes first: the model writes that
        (turns("{% if m.role == 'user' %}<end>{% endif %}"), (), ["[user]"]),
        (turns("</think><end>"), (ReasoningFormat("x", ("<think>",), ("</think>",)),), ["<end>"]),
        ("{% for m in messages %}{% if m.role == 'user' %}[user]{{ m.content }}{% endif %}{% endfor %}", (), []),
        ("{{ raise_exception('no') }}", (), []),
    ],
)
def test_what_stands_behind_an_answer(source: str, formats: tuple, ends: list[str]) -> None:
    assert turn_ends(Renderer(source, {}), NAMES, formats) == ends


def test_what_also_stands_within_a_turn_ends_none() -> None:
    source = (
        "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}{{ m.reasoning_content }}<end>{% endif %}"
        "{{ m.content }}{% for c in m.tool_calls %}<call>{{ c.function.arguments.a }}</call>{% endfor %}<end>"
        "{% endfor %}"
    )
    assert turn_ends(Renderer(source, {}), NAMES) == ["[user]", "[tool]"], "it is the next turn that ends this one"
    apart = source.replace("{{ m.reasoning_content }}<end>", "{{ m.reasoning_content }}</think>")
    assert turn_ends(Renderer(apart, {}), NAMES) == ["<end>"]


def test_calls_may_end_otherwise() -> None:
    source = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.tool_calls %}"
        "{% for c in m.tool_calls %}<call>{{ c.function.arguments.a }}</call>{% endfor %}[tool]{% elif"
        " m.role == 'assistant' %}<end>{% endif %}{% endfor %}"
    )
    assert turn_ends(Renderer(source, {}), NAMES) == ["<end>", "[tool]"]
    one = source.replace("{% for c in m.tool_calls %}", "{% for c in m.tool_calls[:1] %}")
    assert turn_ends(Renderer(one, {}), NAMES) == ["<end>"], "nobody says what belongs to a call"
    format = ToolFormat("x", CALLS.body, ("<call>",), ("</call>",))
    assert turn_ends(Renderer(one, {}), NAMES, (format,)) == ["<end>", "[tool]"]


def found(path: Path, ids: dict[str, list[int]], *, pooler: object = None, **config: Any) -> dict[int, tuple]:
    info: Any = SimpleNamespace(pooler=pooler, vocab_size=100)
    checkpoint = Checkpoint("x", path, "safetensors", {}, {})
    ends = find_ends(
        checkpoint, replace(text_plan(), choices=text_plan().choices[1:]), EngineConfig(**config), info, ids
    )
    return {end.id: (end.token, *end.sources) for end in ends}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    added = [{"id": 5, "content": "<end>", "special": True}, {"id": 6, "content": "<eos>", "special": True}]
    added += [{"id": 200, "content": "<far>", "special": True}]
    vocabulary = {"added_tokens": 3, "a": 1}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
    settings = {
        "eos_token": {"content": "<eos>", "lstrip": False},
        "added_tokens_decoder": {"7": {"content": "<seven>"}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_text(turns("<end>"))
    return tmp_path


def test_all_sources_count(files: Path) -> None:
    ids = {"config": [0, 6], "generation_config": [0]}
    assert found(files, ids) == {
        0: ("", "config", "generation_config"), 5: ("<end>", "chat template"), 6: ("<eos>", "config", "tokenizer"),
    }  # fmt: skip


def test_the_map_of_special_tokens_counts_and_texts_too(files: Path) -> None:
    (files / "tokenizer_config.json").write_text("{}")
    (files / "special_tokens_map.json").write_text('{"eos_token": "<eos>"}')
    assert set(found(files, {})) == {5, 6}


def test_the_map_and_added_tokens_of_old_files_come_first(files: Path) -> None:
    (files / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (files / "special_tokens_map.json").write_text('{"eos_token": {"content": "<nine>"}}')
    (files / "added_tokens.json").write_text('{"<nine>": 9}')
    assert found(files, {})[9] == ("<nine>", "tokenizer")


@pytest.mark.parametrize("vocabulary", [{"a": 0, "b": 1, "<stop>": 2}, [["a", 0], ["b", -1.5], ["<stop>", -2.5]]])
def test_an_end_that_is_a_piece_of_the_vocabulary(files: Path, vocabulary: object) -> None:
    (files / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    (files / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    assert found(files, {})[2] == ("<stop>", "tokenizer")


def test_tokens_that_only_the_settings_know(files: Path) -> None:
    (files / "chat_template.jinja").write_text(turns("<seven>"))
    assert found(files, {})[7] == ("<seven>", "chat template")


def test_a_token_that_the_model_has_no_row_for_ends_nothing(files: Path) -> None:
    (files / "chat_template.jinja").write_text(turns("<far>"))
    assert set(found(files, {})) == {6}


def test_models_that_do_not_write_are_not_asked(files: Path) -> None:
    assert set(found(files, {"config": [1]}, pooler=object())) == {1, 6}


@pytest.mark.parametrize("broken", ["{% for", "{{ 1 / 0 }}"])
def test_a_broken_template_is_for_others_to_tell(files: Path, broken: str) -> None:
    (files / "chat_template.jinja").write_text(broken)
    assert set(found(files, {"config": [1]})) == {1, 6}


def test_files_that_are_missing_or_odd(tmp_path: Path) -> None:
    assert found(tmp_path, {"config": [1]}) == {1: ("", "config")}
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [1, {"id": "x"}, {"content": 2}, ')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": 3, "added_tokens_decoder": {"x": 1, "4": 2}}')
    assert found(tmp_path, {}) == {}
