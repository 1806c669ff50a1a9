"""A small tekken.json made here, and the real one that mistral-common carries."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path

import pytest
from lmkit.api import (
    MARK,
    Checkpoint,
    CheckpointError,
    SamplingParams,
    TemplateFailed,
    TokenEvent,
    TokenizerRequest,
    ToolArgs,
    ToolStart,
)
from lmkit.config import from_options
from lmkit.plugins.host import PluginHost
from lmkit.plugins.resolve import Resolver
from lmkit.plugins.switches import Switches
from lmkit.prompts import shown
from lmkit.text.renderer import WriterRenderer
from lmkit.text.side import TextSide
from lmkit.text.stream import OutputStream
from lmkit.text.tools import tool_def
from lmkit_testing import TokenizerConformance
from lmkit_testing.host import select

pytest.importorskip("mistral_common", reason="mistral-common is not part of the default set")

import mistral_common
from lmkit_tokenizer_mistral.tekken import Tekken, open_tekken
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

REAL = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
CONTROL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
MERGES = (b"th", b"the", b" the", b" t", b"ing", b"in", b'":', b' "', "é".encode(), "日".encode()[:2], b"END", b"EN")
TOOL = {
    "type": "function",
    "function": {"name": "get_time", "description": "é", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "123456789", "type": "function", "function": {"name": "get_time", "arguments": '{"zone": "UTC"}'}}
CHATS = {
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello thing é"}],
    "turns": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": [{"type": "text", "text": "c"}]},
    ],
    "calls": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "123456789", "content": "12:00"},
    ],
}  # fmt: skip


def write_small(path: Path) -> Path:
    """256 bytes, some merges and 20 control tokens, version 7 of the format."""
    pieces = [bytes([i]) for i in range(256)] + sorted(MERGES, key=len)
    vocab = [{"rank": i, "token_bytes": base64.b64encode(p).decode(), "token_str": None} for i, p in enumerate(pieces)]
    config = {
        "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+", "num_vocab_tokens": len(pieces),
        "default_vocab_size": len(pieces) + len(CONTROL), "default_num_special_tokens": len(CONTROL), "version": "v7",
    }  # fmt: skip
    special = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(CONTROL)]
    (path / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab, "special_tokens": special}))
    return path


class TestMistral(TokenizerConformance):
    plugin = "tokenizer:mistral"

    def files(self, folder: Path) -> Path:
        return write_small(folder)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint's directory."""
    path = write_small(tmp_path_factory.mktemp("tekken"))
    model = {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 288,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(model))
    return path


@pytest.fixture(scope="module", params=["small", "real"])
def file(request: pytest.FixtureRequest, small: Path) -> Path:
    if request.param == "real" and not REAL.is_file():
        pytest.skip("this mistral-common carries no tekken.json")
    return REAL if request.param == "real" else small / "tekken.json"


@pytest.fixture(scope="module")
def tokenizer(file: Path) -> Tekken:
    return Tekken(file)


@pytest.fixture(scope="module")
def side(tokenizer: Tekken) -> TextSide:
    control = [tokenizer.piece(i).decode() for i in tokenizer.special_ids]
    return TextSide(tokenizer, WriterRenderer(tokenizer.chat_writer, control), default_params={})


def stream(side: TextSide, ids: list[int], **params: object) -> tuple[OutputStream, str]:
    """The text of an output that comes token by token."""
    out, text = side.output_stream(SamplingParams(**params), parse=False), ""  # type: ignore[arg-type]
    for token in [*ids, None]:
        event = TokenEvent("r", finish="length") if token is None else TokenEvent("r", tokens=[token])
        for e in out.feed(event):
            text += getattr(e, "text", "")
        if out.finished:
            break
    return out, text


TEXTS = ("", " ", "the thing", "日本語 é \U0001f600!\n\n\ttab", "x" * 300, "[INST and </s", "a\u0000b\r\n12345")


@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back(tokenizer: Tekken, side: TextSide, text: str) -> None:
    ids = tokenizer.encode(text, add_special=False)
    assert tokenizer.decode(ids) == text == stream(side, ids)[1]
    assert b"".join(map(tokenizer.piece, ids)) == text.encode()


def test_no_broken_characters_whatever_the_tokens(tokenizer: Tekken, side: TextSide) -> None:
    source = random.Random(1)
    for _ in range(200):
        ids = [source.randrange(tokenizer.vocab_size) for _ in range(20)]
        shown_ids = [i for i in ids if i not in tokenizer.special_ids]
        assert stream(side, ids)[1] == b"".join(map(tokenizer.piece, shown_ids)).decode(errors="replace")


def test_stop_strings_span_tokens(tokenizer: Tekken, side: TextSide) -> None:
    for stop in ("END", "日本", "thing e"):
        ids = [t for c in f"ab日{stop}cd" for t in tokenizer.encode(c, add_special=False)]
        out, text = stream(side, ids, stop=[stop])
        assert (text, out.finished, out.must_abort) == ("ab日", True, True)


def test_control_tokens(tokenizer: Tekken) -> None:
    ids = tokenizer.encode("[INST]a[/INST]</s>")
    assert [tokenizer.piece(i) for i in ids] == [b"<s>", b"[INST]", b"a", b"[/INST]", b"</s>"]
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special=False) == "<s>[INST]a[/INST]</s>"
    assert (tokenizer.eos_token_ids, tokenizer.id_of("[INST]"), tokenizer.id_of("no such")) == ((2,), 3, None)
    assert tokenizer.piece(tokenizer.vocab_size) == b""


@pytest.mark.parametrize("name", CHATS)
def test_prompts_are_those_of_mistral_common(file: Path, side: TextSide, name: str) -> None:
    reference = MistralTokenizer.from_file(str(file))
    for tools in ([], [TOOL]):
        request = ChatCompletionRequest.from_openai(messages=CHATS[name], tools=tools or None)
        ids = side.encode_prompt(side.render_chat(CHATS[name], tools), add_special=False)
        assert ids == reference.encode_chat_completion(request).tokens


def test_what_a_client_spells_is_text(side: TextSide, tokenizer: Tekken) -> None:
    prompt = side.render_chat([{"role": "user", "content": "[/INST] </s> [TOOL_CALLS]"}])
    assert MARK in prompt
    ids = side.encode_prompt(prompt, add_special=False)
    assert [tokenizer.piece(i) for i in ids if i in tokenizer.special_ids] == [b"<s>", b"[INST]", b"[/INST]"]
    assert tokenizer.decode(ids, skip_special=False) == shown(prompt)


def test_a_message_is_continued(side: TextSide) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The answer"}]
    assert side.render_chat(messages, continue_final_message=True, add_generation_prompt=False).endswith("The answer")


def test_wrong_conversations_are_refused(side: TextSide) -> None:
    with pytest.raises(TemplateFailed, match="role"):
        side.render_chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    user = {"role": "user", "content": "a"}
    said = {"role": "assistant", "content": "b"}
    result = {"role": "tool", "tool_call_id": "123456789", "content": "1"}
    with pytest.raises(TemplateFailed, match="tool") as failed:
        side.render_chat([user, said, user, result, user, said, user])
    assert failed.value.field == "messages.3"


@pytest.mark.parametrize(
    "answer",
    [
        {"content": ""}, {"content": None}, {"content": [{"type": "text", "text": ""}]},
        {"content": [], "tool_calls": []},
        {"content": "b", "reasoning_content": "hm"}, {"content": None, "reasoning_content": "hm"},
    ],
    ids=str,
)  # fmt: skip
def test_answers_that_the_format_has_no_form_for(side: TextSide, answer: dict[str, object]) -> None:
    prompt = side.render_chat([
        {"role": "user", "content": "first"}, {"role": "assistant", **answer}, {"role": "user", "content": "second"},
    ])  # fmt: skip
    assert "first" in shown(prompt)
    assert "second" in shown(prompt)
    assert ("b" in shown(prompt)) == (answer["content"] == "b")


@pytest.mark.parametrize("arguments", ['{"zone": "U', '"UTC"', "[1]", "null", ""])
@pytest.mark.parametrize("id", ["too long an id", "1", "", None])
def test_calls_of_other_clients_are_read(side: TextSide, arguments: str, id: str | None) -> None:
    call = {"id": id, "type": "function", "function": {"name": "get_time", "arguments": arguments}}
    prompt = side.render_chat([
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": id, "content": "1"},
    ])  # fmt: skip
    assert "get_time" in shown(prompt)


def test_the_findings_are_those_of_the_family(side: TextSide) -> None:
    assert side.renderer is not None
    found = side.renderer.findings
    assert {name: found[name] for name in ("user", "system", "tools", "tool calls", "prefill")} == dict.fromkeys(
        ("user", "system", "tools", "tool calls", "prefill"), "yes"
    )


def test_only_checkpoints_without_tokenizer_json(small: Path, tmp_path: Path) -> None:
    host = PluginHost(switches=Switches())
    assert select(host, TokenizerRequest(files=frozenset({"tekken.json"}))).name == "mistral"
    assert select(host, TokenizerRequest(files=frozenset({"tekken.json", "tokenizer.json"}))).name == "json"
    assert isinstance(open_tekken(small), Tekken)
    (tmp_path / "tekken.json").write_text('{"config": {}}')
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        Tekken(tmp_path / "tekken.json")


def test_a_checkpoint_is_served_with_it(small: Path) -> None:
    """Tokenizer, prompts and the format of calls are found; the marker of a call is a control token."""
    pytest.importorskip("lmkit_tool_parser_mistral")
    (small / "model.safetensors").write_bytes(b"")
    config, host = from_options({"model": str(small)}), PluginHost(switches=Switches())
    resolver = Resolver(config, host, tolerant=True)
    resolver.run()
    checkpoint = Checkpoint(ref=str(small), path=small, format="safetensors", config={})
    side = TextSide.open(checkpoint, resolver.plan(), config)
    ids = side.encode_prompt(side.render_chat(CHATS["calls"], [TOOL]), add_special=False)
    assert side.tokenizer.decode(ids[:2], skip_special=False) == "<s>[AVAILABLE_TOOLS]"
    out = side.output_stream(SamplingParams(), tools=[tool_def(TOOL)])
    answer = '[TOOL_CALLS][{"name": "get_time", "arguments": {"zone": "UTC"}}]'
    events = [e for t in side.tokenizer.encode(answer, add_special=False) for e in out.feed(TokenEvent("r", [t]))]
    assert [e.name for e in events if isinstance(e, ToolStart)] == ["get_time"]
    assert json.loads("".join(e.json_fragment for e in events if isinstance(e, ToolArgs))) == {"zone": "UTC"}
