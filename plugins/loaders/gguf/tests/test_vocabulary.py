"""Vocabularies of GGUF files: real ones against the ids that llama.cpp gives, small ones, and damaged ones."""

from __future__ import annotations

import copy
import gzip
import json
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmkit.api import MARK, CheckpointError
from lmkit_loader_gguf.file import GgufFile
from lmkit_loader_gguf.vocabulary import end_tokens, open_tokenizer
from lmkit_loader_gguf.vocabulary_models import tokenizer
from lmkit_loader_gguf.vocabulary_splits import SPLITS
from lmkit_testing import TokenizerConformance
from lmkit_testing.checkpoints import byte_tokenizer
from lmkit_testing.gguf_files import vocabulary
from lmkit_tokenizer_json.tokenizer import JsonTokenizer
from tokenizers import Regex, Tokenizer, pre_tokenizers

DATA = Path(__file__).resolve().parents[4].parent / "shared" / "data" / "tokenizers"
REAL = ("bert-bge", "gpt-2", "llama-spm", "phi-3")
BLANK = "\u2581"
Metadata = dict[str, Any]


class TestGgufTokenizer(TokenizerConformance):
    plugin = "tokenizer:gguf"

    def files(self, folder: Path) -> Path:
        """The kit's tokenizer of bytes, as its converter would write it."""
        byte_tokenizer(folder)
        file = folder / "model.gguf"
        writer = gguf.GGUFWriter(file, "llama")
        found = vocabulary(folder)
        merged = {  # a file has one merge at least
            "add_token_list": [*found["add_token_list"], "ab"], "add_token_merges": ["a b"],
            "add_token_types": [*found["add_token_types"], gguf.TokenType.NORMAL],
        }  # fmt: skip
        for method, value in (found | merged).items():
            getattr(writer, method)(value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file


needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs the tokenizers of ../shared/data")


@cache
def metadata_of(name: str) -> Metadata:
    return GgufFile(DATA / f"ggml-vocab-{name}.gguf").metadata


@cache
def made_of(name: str) -> Tokenizer:
    return tokenizer(metadata_of(name) if name in REAL else of_json(name))


def of_json(name: str) -> Metadata:
    """What a GGUF file has of a tokenizer.json."""
    file, pre = {"llama-bpe": ("llama3", "llama-bpe"), "qwen2": ("qwen", "qwen2")}[name]
    data = json.loads(gzip.decompress((DATA / f"{file}_tokenizer.json.gz").read_bytes()))
    model, added = data["model"], data["added_tokens"]
    ids = model["vocab"] | {token["content"]: token["id"] for token in added}
    kinds = {token["id"]: 3 if token["special"] else 4 for token in added}
    texts = {at: text for text, at in ids.items()}
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [texts.get(i, f"[PAD{i}]") for i in range(1 + max(texts))],
        "tokenizer.ggml.token_type": [kinds.get(i, 1 if i in texts else 5) for i in range(1 + max(texts))],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": ids.get("<|begin_of_text|>", 0),
    }


def expected(name: str) -> list[tuple[str, list[int]]]:
    texts = (DATA / f"ggml-vocab-{name}.gguf.inp").read_text().split("\n__ggml_vocab_test__\n")
    lines = (DATA / f"ggml-vocab-{name}.gguf.out").read_text().split("\n")
    assert len(texts) == len(lines)
    return [(text, [int(part) for part in line.split()]) for text, line in zip(texts, lines, strict=True)]


@pytest.mark.one_in(2)
@needs_data
@pytest.mark.parametrize("name", [*REAL, "llama-bpe", "qwen2"])
def test_texts_have_the_ids_that_llama_cpp_gives_them(name: str) -> None:
    made = made_of(name)
    found = [(text, made.encode(text, add_special_tokens=False).ids) for text, _ in expected(name)]
    assert found == expected(name)


@needs_data
@pytest.mark.parametrize("name", ["gpt-2", "llama-spm", "phi-3", "llama-bpe", "qwen2"])
def test_what_is_decoded_is_what_was_encoded(name: str) -> None:
    made = made_of(name)
    for text, ids in expected(name):
        assert made.decode(ids) == text


@needs_data
@pytest.mark.parametrize("name", ["gpt-2", "llama-spm", "phi-3", "llama-bpe", "qwen2"])
def test_texts_that_come_token_by_token_are_whole_ones(name: str) -> None:
    made = JsonTokenizer(made_of(name))
    for text, ids in expected(name):
        detokenizer = made.detokenizer()
        assert "".join(map(detokenizer.feed, ids)) + detokenizer.flush() == text


@needs_data
def test_control_tokens_that_a_client_spells_stay_text() -> None:
    made = JsonTokenizer(made_of("llama-spm"))
    ids = made.encode_marked(f"a <{MARK}s> b", add_special=False)
    assert 1 not in ids
    assert made.decode(ids) == "a <s> b"


@needs_data
def test_words_are_decoded() -> None:
    assert made_of("bert-bge").decode(made_of("bert-bge").encode("Hello World, unbelievably").ids) == (
        "hello world, unbelievably"
    )


@needs_data
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("bert-bge", [101], [102]), ("gpt-2", [], []), ("llama-spm", [1], []), ("llama-bpe", [128000], [])],
)
def test_first_and_last_tokens_are_those_of_llama_cpp(name: str, before: list[int], after: list[int]) -> None:
    made = made_of(name)
    plain = made.encode("Hello world", add_special_tokens=False).ids
    assert made.encode("Hello world").ids == before + plain + after
    assert made.encode("").ids == before + after


@needs_data
def test_a_file_is_read_in_a_process_apart() -> None:
    made = open_tokenizer(DATA / "ggml-vocab-phi-3.gguf")
    assert made.template_variables() == {
        "bos_token": "<s>", "eos_token": "<|endoftext|>", "unk_token": "<unk>", "pad_token": "<|endoftext|>",
    }  # fmt: skip
    assert made.encode("<|user|>\n Hi<|end|>") == [1, 32010, 6324, 32007]  # control tokens take the blanks after them
    assert made.decode(made.encode("Hi there")) == "Hi there"
    assert set(made.eos_token_ids) == set(end_tokens(metadata_of("phi-3"))) >= {32000, 32007}
    assert open_tokenizer(DATA / "ggml-vocab-phi-3.gguf", eos_token_ids=(7,)).eos_token_ids == (7,)


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        open_tokenizer(tmp_path / "m.gguf")
    (tmp_path / "n-00001-of-00002.gguf").write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 0))  # no metadata at all
    with pytest.raises(CheckpointError, match=r"n-00001-of-00002\.gguf: tokenizer\.ggml\.tokens is missing"):
        open_tokenizer(tmp_path / "n-00002-of-00002.gguf")


def pieces(name: str, text: str) -> list[str]:
    parts = [pre_tokenizers.Split(Regex(each), "isolated") for each in SPLITS[name].expressions]
    return [part for part, _ in pre_tokenizers.Sequence(parts).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", sorted(SPLITS))
def test_splits_lose_nothing(name: str) -> None:
    text = "It's 1234567 caf\u00e9s,  \u4f60\u597d HTTPServer\r\n\n\t x=!?  \u0939\u093f\u0928\u094d\u0926\u0940 "
    assert "".join(pieces(name, text)) == text


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("llama-bpe", "It'S 1234567", ["It", "'S", " ", "123", "456", "7"]),
        ("qwen2", "a 12", ["a", " ", "1", "2"]),
        ("qwen35", "\u0939\u093f x", ["\u0939\u093f", " x"]),
        ("gpt-2", "a 12  b", ["a", " 12", " ", " b"]),
        ("smollm", "a 12", ["a", " ", "1", "2"]),
        ("gpt-4o", "HTTPServer's a/\n", ["HTTPServer's", " a", "/\n"]),
        ("tekken", "camelCase 12", ["camel", "Case", " ", "1", "2"]),
        ("deepseek-v3", "ab\u4f60\u597d1234", ["ab", "\u4f60\u597d", "123", "4"]),
        ("deepseek-llm", "\u0414\u0430 1234", ["\u0414\u0430", " ", "1234"]),
        ("kimi-k2", "x\u4f60\u597dy", ["x", "\u4f60\u597d", "y"]),
        ("tiny_aya", "1234567", ["1", "234", "567"]),
        ("afmoe", "1234567", ["1", "234", "567"]),
        ("superbpe", "1234567 a b", ["1", "234", "567", " a b"]),
        ("falcon", "12345!", ["123", "45", "!"]),
        ("gemma4", "a b\n\nc", ["a b", "\n\n", "c"]),
    ],
)
def test_splits_cut_where_the_models_tokenizers_do(name: str, text: str, parts: list[str]) -> None:
    assert pieces(name, text) == parts


def sentencepiece(**changes: Any) -> Metadata:
    fallback = [f"<0x{i:02X}>" for i in range(256)]
    words = [BLANK, "a", "b", BLANK * 2, BLANK * 3, BLANK + "a", "ab", BLANK + "ab", "<x>"]
    scores = [-9.0, -9.0, -9.0, -1000.0, -1000.0, -3.0, -2.0, -4.0, 0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *fallback, *words],
        "tokenizer.ggml.scores": [0.0] * 259 + scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 8 + [4],
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def byte_level(**changes: Any) -> Metadata:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*alphabet, "ab", "abc", "bc", "<|im_end|>", "<t>"],
        "tokenizer.ggml.token_type": [1] * 259 + [1, 4],
        "tokenizer.ggml.merges": ["b c", "a b", "ab c", "b c"],
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def wordpiece(**changes: Any) -> Metadata:
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", BLANK + "un", "do", BLANK + "do", BLANK + "Do"],
        "tokenizer.ggml.token_type": [3, 3, 3, 3, 1, 1, 1, 1],
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def tokens(metadata: Metadata, text: str) -> list[str]:
    return tokenizer(metadata).encode(text, add_special_tokens=False).tokens


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes() -> None:
    assert tokens(sentencepiece(), "ab") == [BLANK + "ab"]
    assert tokens(sentencepiece(add_space_prefix=False), "ab b\u00e9") == (["ab", BLANK, "b", "<0xC3>", "<0xA9>"])
    assert tokens(sentencepiece(), "b<x>b") == [BLANK, "b", "<x>", BLANK, "b"]  # a blank after each such token, too


@pytest.mark.parametrize(("count", "runs"), [(2, [2]), (3, [3]), (4, [3, 1]), (5, [3, 2]), (7, [3, 3, 1])])
def test_runs_whose_tokens_have_one_score_grow_from_the_left(count: int, runs: list[int]) -> None:
    assert tokens(sentencepiece(add_space_prefix=False), " " * count) == [BLANK * each for each in runs]


def test_merges_are_taken_in_their_order() -> None:
    assert tokens(byte_level(), "abc") == ["a", "bc"]  # "b c" comes first
    assert tokens(byte_level(pre="llama-bpe", bos_token_id=0), "abc") == ["abc"]  # whole pieces are not merged there


def test_texts_of_ends_are_control_tokens_whatever_the_file_says() -> None:
    made = tokenizer(byte_level())
    assert made.encode("a<|im_end|>").tokens == ["a", "<|im_end|>"]
    assert made.decode(made.encode("a<|im_end|><t>").ids) == "a<t>"


def test_words_begin_where_the_file_marks_them() -> None:
    assert tokens(wordpiece(), "Undo do X") == ["un", "##do", "do", "[UNK]"]
    assert tokens(wordpiece(**{"normalizer.lowercase": False}), "Do undo") == ["Do", "un", "##do"]
    assert tokenizer(wordpiece()).encode("do", "undo").tokens == ["[CLS]", "do", "[SEP]", "un", "##do", "[SEP]"]


def test_characters_are_merged_as_they_are() -> None:
    words = ["<bos>", BLANK, "a", BLANK + "a", "\n", "\n\n", *(f"<0x{i:02X}>" for i in range(256))]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [3] + [1] * 5 + [6] * 256,
        "tokenizer.ggml.merges": [f"{BLANK} a"],
        "tokenizer.ggml.bos_token_id": 0,
    }
    assert tokenizer(metadata).encode("a a\n\n\u00e9").tokens == (
        ["<bos>", "a", BLANK + "a", "\n\n", "<0xC3>", "<0xA9>"]
    )
    assert tokenizer(metadata).decode([2, 3, 5]) == "a a\n\n"


@pytest.mark.parametrize(
    ("add_bos", "add_eos", "ids"), [(None, None, [1, 260]), (False, True, [260, 2]), (True, True, [1, 260, 2])]
)
def test_flags_say_what_frames_a_text(add_bos: bool | None, add_eos: bool | None, ids: list[int]) -> None:
    flags = {"add_bos_token": add_bos, "add_eos_token": add_eos}
    made = tokenizer(sentencepiece(add_space_prefix=False, **{k: v for k, v in flags.items() if v is not None}))
    assert made.encode("a").ids == ids


@pytest.mark.parametrize(
    ("texts", "given_ids", "ends"),
    [
        (["a", "b", "c"], {"eos_token_id": 2}, [2]),
        (["a", "<|im_end|>", "<|endoftext|>"], {"eos_token_id": 0}, [0, 1, 2]),
        (["a", "<|return|>", "<|call|>", "<|end|>"], {}, [1, 2]),
        (["a", "</s>", "<turn|>", "<|tool_response>"], {}, [2, 3]),
        (["a", "<|fim_pad|>", "<|repo_name|>"], {"fim_rep_token_id": 0}, [0, 1]),
    ],
)
def test_ends_of_generation(texts: list[str], given_ids: dict[str, int], ends: list[int]) -> None:
    metadata = {f"tokenizer.ggml.{key}": at for key, at in given_ids.items()}
    assert end_tokens({"tokenizer.ggml.tokens": texts, **metadata}) == ends


def test_the_end_that_a_sentencepiece_model_has_without_saying() -> None:
    assert end_tokens({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a", "b", "c"]}) == [2]
    assert end_tokens({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a", "b"]}) == []


def test_without_a_vocabulary_nothing_ends() -> None:
    assert end_tokens({"tokenizer.ggml.eos_token_id": 3}) == []


BAD: list[tuple[Callable[..., Metadata], dict[str, Any], str]] = [
    (byte_level, {"model": "t5"}, r"tokenizer\.ggml\.model is 't5'.*bert.*gpt2.*llama"),
    (byte_level, {"model": 3}, r"tokenizer\.ggml\.model is 3"),
    (byte_level, {"pre": "nobody"}, r"tokenizer\.ggml\.pre is 'nobody'.*llama-bpe.*qwen2"),
    (byte_level, {"tokens": []}, r"tokenizer\.ggml\.tokens has 0 texts"),
    (byte_level, {"tokens": ["a", "b", "a"]}, r"tokenizer\.ggml\.tokens has 'a' twice"),
    (byte_level, {"tokens": "abc"}, r"tokenizer\.ggml\.tokens is 'abc'"),
    (byte_level, {"tokens": ["a", 1]}, r"tokenizer\.ggml\.tokens is no list of texts"),
    (byte_level, {"tokens": ["a", "\ud800"]}, r"tokenizer\.ggml\.tokens has a text that is no Unicode"),
    (byte_level, {"token_type": [1]}, r"tokenizer\.ggml\.token_type has 1 values for 261 tokens"),
    (byte_level, {"token_type": [9] * 261}, r"tokenizer\.ggml\.token_type has what is no type"),
    (byte_level, {"merges": ["ab"]}, r"tokenizer\.ggml\.merges has 'ab'"),
    (byte_level, {"merges": ["a z z"]}, r"tokenizer\.ggml\.merges has 'a z z', but 'z z' is no token"),
    (byte_level, {"merges": ["c c"]}, r"tokenizer\.ggml\.merges has 'c c', but 'cc' is no token"),
    (byte_level, {"merges": None}, r"tokenizer\.ggml\.merges is of type NoneType"),
    (byte_level, {"bos_token_id": 261}, r"tokenizer\.ggml\.bos_token_id is 261; an id from 0 to 260"),
    (byte_level, {"bos_token_id": True}, r"tokenizer\.ggml\.bos_token_id is True"),
    (byte_level, {"add_bos_token": 1}, r"tokenizer\.ggml\.add_bos_token is 1; true or false"),
    (byte_level, {"pre": "llama-bpe"}, r"tokenizer\.ggml\.bos_token_id is missing, and BOS is written"),
    (sentencepiece, {"scores": [0.0] * 267 + [float("nan")]}, r"tokenizer\.ggml\.scores is no list of finite numbers"),
    (sentencepiece, {"scores": [0.0]}, r"tokenizer\.ggml\.scores has 1 values for 268 tokens"),
    (wordpiece, {"tokens": ["[UNK]", "x[CLS]", "[SEP]", "[a]", BLANK + "[a]", "b", "c", "d"]}, r"has '\[a\]' twice"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "changes", "message"), BAD)
def test_damaged_metadata_are_refused_by_key(base: Callable[..., Metadata], changes: Metadata, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        tokenizer(base(**changes))


def test_a_missing_split_is_refused() -> None:
    metadata = byte_level()
    del metadata["tokenizer.ggml.pre"]
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre is missing"):
        tokenizer(metadata)


def test_pieces_that_are_too_long_are_refused() -> None:
    metadata = sentencepiece()
    metadata["tokenizer.ggml.tokens"][-1] = "x" * (1 << 16)
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.tokens are too long"):
        tokenizer(metadata)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.sampled_from([1 << 31, -(1 << 70), 1 << 2000]), st.floats(),
    st.text(max_size=5),
    st.sampled_from(["", " ", "a", BLANK, "<unk>", "a b", "[UNK]", "##x", "llama", "gpt2", "bert"]),
    st.lists(st.one_of(st.text(max_size=3), st.integers(-1, 9), st.floats()), max_size=4),
)  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> Metadata:
    """Good metadata, of which some keys are gone, have another value, or one other value in their list."""
    metadata = copy.deepcopy(draw(st.sampled_from([sentencepiece, byte_level, wordpiece]))())
    names = ["add_bos_token", "add_eos_token", "add_space_prefix", "bos_token_id", "eos_token_id", "unknown_token_id"]
    keys = sorted({*metadata, *(f"tokenizer.ggml.{name}" for name in names)})
    for key in draw(st.lists(st.sampled_from(keys), min_size=1, max_size=4)):
        old = metadata.get(key)
        how = draw(st.sampled_from(["gone", "other", "one", "shorter"]))
        if how == "gone":
            metadata.pop(key, None)
        elif how == "shorter" and isinstance(old, list):
            del old[draw(st.integers(0, len(old))) :]
        elif how == "one" and isinstance(old, list) and old:
            old[draw(st.integers(0, len(old) - 1))] = draw(VALUES)
        else:
            metadata[key] = draw(VALUES)
    return metadata


@given(mutated(), st.text(max_size=12))
def test_whatever_stands_in_metadata_is_a_tokenizer_or_a_typed_error(metadata: Metadata, text: str) -> None:
    try:
        made = tokenizer(metadata)
        ends = end_tokens(metadata)
    except CheckpointError as e:
        named = "tokenizer.ggml" in e.message
    else:
        named = None
    if named is not None:
        assert named
        return
    size = len(metadata["tokenizer.ggml.tokens"])
    assert all(0 <= at < size for at in made.encode(text).ids + ends)
    made.decode(made.encode(text).ids)
