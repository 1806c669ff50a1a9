"""Added tokens of every file, and decoding, against transformers' AutoTokenizer."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lmkit.api import CheckpointError
from lmkit_tokenizer_json.apart import open_tokenizer
from lmkit_tokenizer_json.cleanup import CleaningDetokenizer, clean_up
from lmkit_tokenizer_json.tokenizer import JsonTokenizer, read_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

WORDS = ["a", "b", ".", ",", "'", "n", "t", "s", "<s>", "</s>", "<in>", "Z", "\u2581"]
CONTENTS = ["<s>", "</s>", "<in>", "<t0>", "<t1>", "<T2>", "<t3>", "b", "[PAD]"]
NAMES = ["bos_token", "eos_token", "unk_token", "pad_token", "image_token", "think_token"]
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")

contents = st.sampled_from(CONTENTS)
flags = st.dictionaries(st.sampled_from(FLAGS), st.booleans())
typed = st.builds(lambda c, f: {"__type": "AddedToken", "content": c, **f}, contents, flags)
plain = st.builds(lambda c, f: {"content": c, **f}, contents, flags)
decoder = st.dictionaries(st.integers(0, 30).map(str), plain, max_size=4)
named = st.dictionaries(st.sampled_from(NAMES), st.one_of(contents, typed), max_size=3)
lists = st.lists(st.one_of(contents, typed), max_size=3, unique_by=str)
extras = st.one_of(lists, st.dictionaries(st.sampled_from(NAMES), contents, max_size=2))
configs = st.builds(
    lambda names, optional: {"tokenizer_class": "PreTrainedTokenizerFast", **names, **optional},
    named,
    st.fixed_dictionaries(
        {},
        optional={
            "added_tokens_decoder": decoder,
            "additional_special_tokens": lists,
            "extra_special_tokens": extras,
            "clean_up_tokenization_spaces": st.booleans(),
            "split_special_tokens": st.booleans(),
            "model_max_length": st.just(1000),
        },
    ),
)
maps = st.builds(
    lambda names, optional: {**names, **optional},
    st.dictionaries(st.sampled_from(NAMES), st.one_of(contents, plain), max_size=3),
    st.fixed_dictionaries({}, optional={"additional_special_tokens": st.lists(contents, max_size=2, unique=True),
                                        "extra_special_tokens": st.lists(contents, max_size=2, unique=True)}),
)  # fmt: skip
legacy = st.dictionaries(contents, st.integers(0, 30), max_size=3)
texts = st.lists(st.sampled_from([*CONTENTS, *WORDS, "<tQ0>", "<sQ>", " ", "  ", " n't", " ' "]), max_size=12).map(
    "".join
)


def make(kind: str, added: list[tuple[str, dict[str, bool]]], normalized: bool) -> Tokenizer:
    vocabulary = {word: i for i, word in enumerate(["<unk>", *WORDS])}
    if kind == "bpe":
        raw = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
        raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    elif kind == "unigram":
        raw = Tokenizer(models.Unigram([(word, -1.0) for word in vocabulary], unk_id=0))
        raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        raw.pre_tokenizer = pre_tokenizers.Whitespace()
    if normalized:
        raw.normalizer = normalizers.Replace("Q", "")
    raw.add_tokens([AddedToken(content, **options) for content, options in added])
    return raw


def write(path: Path, raw: Tokenizer, **files: Any) -> None:
    raw.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text('{"model_type": "llama"}')
    for name, content in files.items():
        if content is not None:
            (path / f"{name}.json").write_text(json.dumps(content))


def joined(tokenizer: JsonTokenizer, ids: list[int], **options: Any) -> str:
    detokenizer = tokenizer.detokenizer(**options)
    return "".join(map(detokenizer.feed, ids)) + detokenizer.flush()


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["bpe", "unigram", "words"]), st.lists(st.tuples(contents, flags), max_size=3), st.booleans(),
    configs, st.none() | maps, st.none() | legacy, st.lists(texts, min_size=1, max_size=3),
)  # fmt: skip
def test_any_files_are_read_as_transformers_reads_them(
    kind: str, added: list[Any], normalized: bool, config: Any, special_map: Any, more: Any, written: list[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        files = {"tokenizer_config": config, "special_tokens_map": special_map, "added_tokens": more}
        write(path, make(kind, added, normalized), **files)
        theirs = transformers.AutoTokenizer.from_pretrained(path)
        tokenizer = read_tokenizer(path)
    assert tokenizer.table()["added"] == [
        (i, t.content, t.special or t.content in specials(theirs), tokenizer._raw.model.id_to_token(i) is not None)
        for i, t in theirs.added_tokens_decoder.items()
    ]
    for text in written:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text)
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip_special=skip) == expected
            assert joined(tokenizer, ids, skip_special=skip) == expected
    for name in NAMES:
        if (token := getattr(theirs, name, None)) is not None:
            assert tokenizer.special_tokens[name] == token


def specials(theirs: Any) -> set[str]:
    """Texts that are left out of decoded text, whatever flags are shown: a token that was special once stays it."""
    return {
        token.content for i, token in theirs.added_tokens_decoder.items()
        if theirs.backend_tokenizer.decode([i], skip_special_tokens=True) == ""
        and theirs.backend_tokenizer.decode([i], skip_special_tokens=False) != ""
    }  # fmt: skip


def opened(path: Path, *added: tuple[str, dict[str, bool]], **files: Any) -> JsonTokenizer:
    """Whatever the files say, through the process apart, as the server has it."""
    write(path, make("words", list(added), normalized=False), **files)
    return open_tokenizer(path)


def test_flags_of_the_configuration_replace_those_of_the_file(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"14": {"content": "<t0>", "rstrip": True, "special": True}}}
    tokenizer = opened(tmp_path, ("<t0>", {"special": True}), tokenizer_config=config)
    assert tokenizer.encode("<t0>  a") == [14, 1]
    assert tokenizer.special_ids == {14}


@pytest.mark.parametrize("field", ["additional_special_tokens", "extra_special_tokens"])
@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
@pytest.mark.parametrize("token", ["<t0>", {"content": "<t0>", "lstrip": False}])
def test_lists_of_special_tokens_are_added(tmp_path: Path, file: str, field: str, token: object) -> None:
    tokenizer = opened(tmp_path, **{file: {field: [token]}})
    assert tokenizer.encode("a<t0>b") == [1, 14, 2]
    assert tokenizer.decode([1, 14, 2]) == "a b"
    assert joined(tokenizer, [1, 14], skip_special=False) == "a <t0>"


def test_a_token_with_only_a_name_is_added_and_ends_answers(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, tokenizer_config={"eos_token": "<end>", "pad_token": "</s>"})
    assert (tokenizer.id_of("<end>"), tokenizer.eos_token_ids) == (14, (14,))
    assert tokenizer.special_ids == {14, 10}  # the other one was in the vocabulary already, as a word


def test_added_tokens_file(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, added_tokens={"<t0>": 14, "<t1>": 15}, special_tokens_map={"unk_token": "<t1>"})
    assert tokenizer.encode("<t1><t0>") == [15, 14]
    assert tokenizer.special_ids == {15}


def test_ids_with_gaps_are_those_of_transformers_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {"added_tokens_decoder": {"900": {"content": "<t1>"}, "40": {"content": "<t0>"}}, "pad_token": 7}
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: pad_token is 7"):
        opened(tmp_path, tokenizer_config=config)
    del config["pad_token"]
    with caplog.at_level(logging.WARNING):
        tokenizer = opened(tmp_path, tokenizer_config=config)
    assert (tokenizer.id_of("<t0>"), tokenizer.id_of("<t1>"), tokenizer.vocab_size) == (14, 15, 16)
    assert "the token '<t0>' the id 40; it has 14" in caplog.text


def test_what_transformers_ignores_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        opened(tmp_path, tokenizer_config={"added_tokens_decoder": {}}, added_tokens={"<t0>": 14},
               special_tokens_map={"additional_special_tokens": ["<t1>"]})  # fmt: skip
    assert "'<t0>' of added_tokens.json is not added" in caplog.text
    assert "'<t1>' of special_tokens_map.json is not added" in caplog.text


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": {"added_tokens_decoder": []}}, r"added_tokens_decoder is \[\], needs an object"),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "y"}}}},
            "added_tokens_decoder is 'x', needs a token's id",
        ),
        ({"tokenizer_config": {"added_tokens_decoder": {"9" * 5000: {"content": "y"}}}}, "added_tokens_decoder is '9"),
        ({"tokenizer_config": {"added_tokens_decoder": {"14": "y"}}}, "14 is 'y', needs a token"),
        ({"tokenizer_config": {"added_tokens_decoder": {"14": {"content": "y", "rstrip": 1}}}}, "14.rstrip is 1"),
        ({"tokenizer_config": {"extra_special_tokens": "y"}}, "extra_special_tokens is 'y', needs a list"),
        ({"special_tokens_map": {"additional_special_tokens": [3]}}, "extra_special_tokens is 3, needs a token"),
        ({"added_tokens": {"y": 1.5}}, r"added_tokens\.json: y is 1\.5"),
        ({"added_tokens": {"y": -1}}, r"added_tokens\.json: y is -1"),
    ],
)
def test_what_cannot_be_a_token_is_refused(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path, **files)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from([" ", "  ", "'", " '", " n", "n't", "t", " ' ", ".", " ?", "s", "ve", " re", "x"])))
def test_cleaned_text_is_the_same_at_every_split(parts: list[str]) -> None:
    class Parts:
        def feed(self, token: int) -> str:
            return parts[token]

        def flush(self) -> str:
            return " ."

    detokenizer = CleaningDetokenizer(Parts())
    text = "".join(map(detokenizer.feed, range(len(parts)))) + detokenizer.flush()
    assert text == clean_up("".join(parts) + " .")
