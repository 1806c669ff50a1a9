"""TextSide.open: where tokenizer, template, defaults and parsers come from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from lmkit.api import (
    Checkpoint,
    CheckpointError,
    Choice,
    ConfigError,
    Derived,
    SamplingParams,
    TemplateFailed,
    Text,
    TokenEvent,
    Tokenizer,
    ToolChoice,
    ToolDef,
    ToolStart,
)
from lmkit.config import EngineConfig
from lmkit.text.side import TextSide
from lmkit_testing.engines import no_plan
from lmkit_testing.serving import CALLS, END, THINK, byte_tokenizer, text_plan, text_side


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    byte_tokenizer()._raw.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": "{{ messages[0].content }}!"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    generation = {"temperature": 0.6, "top_k": 20, "eos_token_id": [5, 6], "do_sample": True}
    return Checkpoint("x", tmp_path, "safetensors", {"eos_token_id": 7}, generation)


def test_open(checkpoint: Checkpoint) -> None:
    side = TextSide.open(checkpoint, text_plan(), EngineConfig())
    assert side.tokenizer.eos_token_ids == (5, 6)
    assert side.default_params == {"temperature": 0.6, "top_k": 20}
    assert side.render_chat([{"role": "user", "content": "hi"}]) == "hi!"
    assert side.tool_format is None
    assert side.output_stream(SamplingParams(), "", [ToolDef("f")]).parser is None


def test_the_plan_decides(checkpoint: Checkpoint) -> None:
    choice = Choice("tool_parser", "", "calls", "lmkit_testing.serving:CALLS", "lmkit-core", "0.1.0", "x")
    plan = text_plan()
    plan = type(plan)(plan.device, (*plan.choices, choice), (Derived("eos_token_ids", [9], "test"),))
    side = TextSide.open(checkpoint, plan, EngineConfig())
    assert side.tool_format == CALLS
    assert side.tokenizer.eos_token_ids == (9,)


def test_overrides(checkpoint: Checkpoint, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("mine")
    config = EngineConfig()
    chosen = replace(config, model=replace(config.model, chat_template=str(template)))
    assert TextSide.open(checkpoint, text_plan(), chosen).render_chat([{"role": "user", "content": "hi"}]) == "mine"
    missing = replace(config, model=replace(config.model, chat_template=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="cannot read the chat template"):
        TextSide.open(checkpoint, text_plan(), missing)
    other = replace(config, model=replace(config.model, tokenizer=str(tmp_path / "none")))
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        TextSide.open(checkpoint, no_plan(), other)
    offline = replace(config, model=replace(config.model, tokenizer="org/name", offline=True, cache_dir=str(tmp_path)))
    with pytest.raises(CheckpointError, match="org/name is not in the cache"):
        TextSide.open(checkpoint, text_plan(), offline)


def test_without_a_tokenizer(checkpoint: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match=r"installed reads .*tokenizer\.json") as caught:
        TextSide.open(checkpoint, no_plan(), EngineConfig())
    assert "plugins/tokenizers/json" in caught.value.fix
    (checkpoint.path / "tokenizer.json").rename(checkpoint.path / "tokenizer.model")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json.*tokenizer\.model") as caught:
        TextSide.open(checkpoint, no_plan(), EngineConfig())
    assert "save_pretrained" in caught.value.fix


def test_a_tokenizer_of_a_plugin() -> None:
    """It needs no more than what is abstract."""

    class Letters(Tokenizer):
        vocab_size, eos_token_ids, bos_token, eos_token = 128, (0,), None, None
        special_ids = frozenset({0, 1})

        def encode(self, text: str, *, add_special: bool = True) -> list[int]:
            return list(text.encode())

        def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
            return bytes(ids).decode()

        def piece(self, token: int) -> bytes:
            return {0: b"<end>", 1: b"<tool_call>"}.get(token, bytes([token]))

        def id_of(self, text: str) -> int | None:
            return {"<end>": 0, "<tool_call>": 1}.get(text)

    side = TextSide(Letters(), None, CALLS, None, {})
    ids = [*b"a", 1, *b'{"name": "f"}</tool_call>', 0]
    events = side.output_stream(SamplingParams(), "", [ToolDef("f")]).feed(TokenEvent("r", ids, "stop", 0))
    assert events[0] == Text("a")
    assert [e.name for e in events if isinstance(e, ToolStart)] == ["f"]
    assert side.output_stream(SamplingParams(), parse=False).feed(TokenEvent("r", [97, 0]))[0] == Text("a")


def test_without_a_template(checkpoint: Checkpoint) -> None:
    (checkpoint.path / "tokenizer_config.json").write_text("{}")
    side = TextSide.open(checkpoint, text_plan(), EngineConfig())
    with pytest.raises(TemplateFailed, match="no chat template"):
        side.render_chat([{"role": "user", "content": "hi"}])


def test_a_template_for_tools_is_used(checkpoint: Checkpoint) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].name }}"}]
    (checkpoint.path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    side = TextSide.open(checkpoint, text_plan(), EngineConfig())
    user = [{"role": "user", "content": "hi"}]
    assert side.render_chat(user) == "plain"
    assert side.render_chat(user, [{"name": "f"}]) == "f"


def grammar_of(choice: ToolChoice, parallel: bool) -> str:
    tools = [ToolDef("f", parameters={"type": "object"}), ToolDef("g")]
    params, constrained = text_side().constrain(SamplingParams(), "", {}, tools, choice, parallel=parallel)
    assert params.grammar is not None
    assert constrained
    return params.grammar.source


def test_a_named_tool_is_called_once() -> None:
    named = ToolChoice("named", "f")
    assert grammar_of(named, True) == grammar_of(named, False)
    assert '"stop_after_first": true' in grammar_of(named, True)
    assert '"stop_after_first": false' in grammar_of(ToolChoice("required"), True)


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        ('{"a": "<tool_call>{}"}', '{"a": "<tool_call>{}"}', 0),
        (f'{{"a": "<think>x</think>{CALL}"}}', f'{{"a": "<think>x</think>{CALL}"}}', 0),
        (f"<think>{CALL}</think>\n[1]", "\n[1]", 0),
        (f"\n{CALL}\n{CALL}", "", 2),
        (f"<think>mull</think>\n{CALL}", "", 1),
        (f"<tool_call>[] {CALL}", f"<tool_call>[] {CALL}", 0),
    ],
)
def test_markers_inside_of_a_constrained_answer_are_text(text: str, content: str, num_calls: int, size: int) -> None:
    side = text_side(reasoning=replace(THINK, anywhere=True))
    stream = side.output_stream(SamplingParams(), "", [ToolDef("f")], constrained=True)
    ids = [*side.tokenizer.encode(text), END]
    parts = [TokenEvent("r", ids[i : i + size]) for i in range(0, len(ids), size)]
    parts[-1].finish, parts[-1].stop_token = "stop", END
    events = [e for part in parts for e in stream.feed(part)]
    assert "".join(e.text for e in events if isinstance(e, Text)) == content
    assert sum(isinstance(e, ToolStart) for e in events) == num_calls
