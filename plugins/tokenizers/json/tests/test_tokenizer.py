"""Tokenizers and detokenizers: ids as expected, deltas join to the full decode (T2), never half a character."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lmkit.api import CheckpointError
from lmkit_testing import TokenizerConformance
from lmkit_testing.clock import least
from lmkit_tokenizer_json.apart import open_tokenizer
from lmkit_tokenizer_json.tokenizer import JsonTokenizer
from tokenizers import Tokenizer, decoders, models


class TestJson(TokenizerConformance):
    plugin = "tokenizer:json"


MANY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)


def joined(tokenizer: JsonTokenizer, ids: list[int], **options: object) -> str:
    detokenizer = tokenizer.detokenizer(**options)  # type: ignore[arg-type]
    deltas = [detokenizer.feed(i) for i in ids]
    return "".join(deltas) + detokenizer.flush()


@pytest.mark.parametrize(("name", "vectors"), [("qwen", "ggml-vocab-qwen2"), ("llama3", "ggml-vocab-llama-bpe")])
def test_known_ids(real: Callable[[str], JsonTokenizer], data: Path, name: str, vectors: str) -> None:
    tokenizer = real(name)
    texts = (data / "tokenizers" / f"{vectors}.gguf.inp").read_text(encoding="utf-8")
    expected = (data / "tokenizers" / f"{vectors}.gguf.out").read_text(encoding="utf-8").splitlines()
    inputs = texts.split("\n__ggml_vocab_test__\n")
    pairs = list(zip(inputs, expected, strict=False))
    assert len(pairs) > 40
    for text, line in pairs:
        ids = tokenizer.encode(text, add_special=False)
        assert ids == [int(i) for i in line.split()], text
        assert tokenizer.decode(ids) == text
        assert joined(tokenizer, ids) == text


@MANY
@given(st.text(max_size=40))
def test_deltas_join_to_the_text(real: Callable[[str], JsonTokenizer], text: str) -> None:
    for name in ("qwen", "llama3", "gpt_neox"):
        tokenizer = real(name)
        ids = tokenizer.encode(text, add_special=False)
        assert joined(tokenizer, ids, skip_special=False) == tokenizer.decode(ids, skip_special=False)


@MANY
@given(st.data())
def test_deltas_of_any_ids_join_to_the_full_decode(
    byte_level: JsonTokenizer, sentencepiece_like: JsonTokenizer, data: st.DataObject
) -> None:
    """Any ids, also those that are no valid text: broken characters, specials in the middle."""
    for tokenizer in (byte_level, sentencepiece_like):
        # ids around the interesting borders, so that valid and broken characters both occur
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
        for skip in (True, False):
            assert joined(tokenizer, ids, skip_special=skip) == tokenizer.decode(ids, skip_special=skip)


@MANY
@given(st.lists(st.sampled_from(list("é😀漢字 ab\ufffd")), max_size=8))
def test_no_half_characters(byte_level: JsonTokenizer, sentencepiece_like: JsonTokenizer, chars: list[str]) -> None:
    written = "".join(chars)
    for tokenizer, ids in (
        (byte_level, byte_level.encode(written)),
        (sentencepiece_like, [3 + b for b in written.encode()]),
    ):
        text = tokenizer.decode(ids)  # the second decoder drops one leading blank
        assert text.strip() == written.strip()
        detokenizer = tokenizer.detokenizer()
        out = ""
        for i in ids:
            delta = detokenizer.feed(i)
            out += delta
            assert text.startswith(out)
        assert out + detokenizer.flush() == text


@MANY
@given(st.lists(st.integers(0, 50_000), max_size=30))
def test_deltas_of_any_real_ids(real: Callable[[str], JsonTokenizer], ids: list[int]) -> None:
    for name in ("qwen", "llama3", "gpt_neox"):
        assert joined(real(name), ids) == real(name).decode(ids)


def test_other_decoders() -> None:
    raw = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2, ",": 3, "do": 4, "n": 5, "'": 6, "t": 7}))
    raw.decoder = decoders.WordPiece(cleanup=False)
    tokenizer = JsonTokenizer(raw)
    for ids in ([1, 2, 3, 1], [2, 1], [4, 5, 6, 7]):
        assert joined(tokenizer, ids) == tokenizer.decode(ids)


def test_text_that_goes_on_keeps_its_blank(sentencepiece_like: JsonTokenizer) -> None:
    hello, world = sentencepiece_like.id_of("\u2581hello") or 0, sentencepiece_like.id_of("\u2581wor") or 0
    for context, expected in (([], "wor"), ([hello], " wor"), ([1, hello], " wor"), ([1], "wor")):
        detokenizer = sentencepiece_like.detokenizer(context=context)
        assert detokenizer.feed(world) + detokenizer.flush() == expected


def test_kept_special_tokens(byte_level: JsonTokenizer) -> None:
    ids = byte_level.encode("x<tool_call>y<|end|>")
    assert joined(byte_level, ids) == "xy"
    assert joined(byte_level, ids, keep=frozenset({"<tool_call>"})) == "x<tool_call>y"
    assert joined(byte_level, ids, skip_special=False) == "x<tool_call>y<|end|>"


def test_pieces(byte_level: JsonTokenizer, sentencepiece_like: JsonTokenizer) -> None:
    text = "é a b<|end|>"
    assert b"".join(byte_level.piece(i) for i in byte_level.encode(text)) == text.encode()
    assert sentencepiece_like.piece(3 + 0xC3) == b"\xc3"
    assert sentencepiece_like.piece(sentencepiece_like.id_of("\u2581hello") or 0) == b" hello"
    assert byte_level.piece(10**6) == b""


def test_detokenizing_is_linear(sentencepiece_like: JsonTokenizer, byte_level: JsonTokenizer) -> None:
    """Also for runs of bytes that never become a character."""
    for tokenizer, token in ((sentencepiece_like, 3 + 0xFF), (byte_level, byte_level.encode("é")[0])):

        def seconds(tokenizer: JsonTokenizer = tokenizer, token: int = token) -> float:
            begin = time.process_time()
            assert len(joined(tokenizer, [token] * 50_000)) == 50_000
            return time.process_time() - begin

        assert least(seconds, 1) < 1


def write(folder: Path, **files: object) -> Path:
    raw = Tokenizer(models.BPE({"a": 0, "b": 1, "<s>": 2, "</s>": 3}, []))
    raw.add_special_tokens(["<s>", "</s>"])
    raw.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        file = folder / {"config": "tokenizer_config.json", "map": "special_tokens_map.json"}.get(
            name, "chat_template.jinja"
        )
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_configuration_files(tmp_path: Path) -> None:
    config = {
        "bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True, "chat_template": "config",
        "added_tokens_decoder": {"4": {"content": "<think>"}, "9": {"content": "<gap>", "special": True}},
    }  # fmt: skip
    tokenizer = open_tokenizer(write(tmp_path, config=config, map={"pad_token": "</s>"}))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_ids) == ("<s>", "</s>", (3,))
    assert tokenizer.special_tokens["pad_token"] == "</s>"
    assert tokenizer.encode("ab") == [2, 0, 1]
    assert tokenizer.encode("ab", add_special=False) == [0, 1]
    assert tokenizer.encode("a<think>b", add_special=False) == [0, 4, 1]
    assert tokenizer.id_of("<gap>") == 5  # the next free one, as in transformers
    assert tokenizer.vocab_size == 6
    assert tokenizer.chat_template == "config"


def test_template_file_comes_before_the_config(tmp_path: Path) -> None:
    folder = write(tmp_path, config={"chat_template": "config"}, template="file")
    assert open_tokenizer(folder).chat_template == "file"
    assert open_tokenizer(folder, chat_template="given").chat_template == "given"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert open_tokenizer(write(tmp_path, config={"chat_template": named})).chat_template == "plain"


def test_missing_and_damaged(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        open_tokenizer(tmp_path)
    write(tmp_path, config="[")
    with pytest.raises(CheckpointError, match="not JSON"):
        open_tokenizer(tmp_path)
