"""Detokenizing real vocabularies: SentencePiece with byte fallback, WordPiece and GPT-2 BPE, from GGUF files.

The ids are those that the makers of the vocabularies state for each text; the text must come back, streamed and whole.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit_tokenizer_json.tokenizer import JsonTokenizer
from tokenizers import Tokenizer, decoders, models

files = pytest.importorskip("lmkit_loader_gguf.file", reason="it reads the vocabularies")
DATA = Path(__file__).resolve().parents[5] / "shared" / "data" / "tokenizers"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="needs the tokenizers of ../shared/data")

SPM = decoders.Sequence([
    decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
])  # fmt: skip
KINDS = {
    "llama-spm": (lambda vocab: models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"), SPM),
    "gpt-2": (lambda vocab: models.BPE(vocab, []), decoders.ByteLevel()),
    "bert-bge": (lambda vocab: models.WordPiece(vocab, unk_token="[UNK]"), decoders.WordPiece(cleanup=False)),
}
_made: dict[str, JsonTokenizer] = {}


def tokenizer(name: str) -> JsonTokenizer:
    if name not in _made:
        pieces = files.GgufFile(DATA / f"ggml-vocab-{name}.gguf").metadata["tokenizer.ggml.tokens"]
        if name == "bert-bge":  # the file marks where words begin instead of where they go on
            pieces = [p[1:] if p.startswith("\u2581") else p if p.startswith("[") else f"##{p}" for p in pieces]
        model, decoder = KINDS[name]
        raw = Tokenizer(model({piece: i for i, piece in enumerate(pieces)}))
        raw.decoder = decoder
        _made[name] = JsonTokenizer(raw)
    return _made[name]


def vectors(name: str) -> list[tuple[str, list[int]]]:
    texts = (DATA / f"ggml-vocab-{name}.gguf.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = (DATA / f"ggml-vocab-{name}.gguf.out").read_text().splitlines()
    return [(text, list(map(int, line.split()))) for text, line in zip(texts, lines, strict=False)]


def streamed(tok: JsonTokenizer, ids: list[int]) -> str:
    detokenizer = tok.detokenizer(skip_special=False)
    return "".join(detokenizer.feed(i) for i in ids) + detokenizer.flush()


@pytest.mark.parametrize("name", ["llama-spm", "gpt-2"])
def test_known_ids_give_the_text(name: str) -> None:
    tok = tokenizer(name)
    cases = [(text, ids) for text, ids in vectors(name) if ids]
    assert len(cases) > 40
    for text, ids in cases:
        assert streamed(tok, ids) == tok.decode(ids, skip_special=False) == text


def test_wordpiece_streams_as_it_decodes() -> None:
    tok = tokenizer("bert-bge")
    for _, ids in vectors("bert-bge"):
        assert streamed(tok, ids) == tok.decode(ids, skip_special=False)


@pytest.mark.parametrize("name", list(KINDS))
@settings(max_examples=60, deadline=None)
@given(source=st.randoms(use_true_random=False))
def test_any_ids_stream_as_they_decode(name: str, source) -> None:
    tok = tokenizer(name)
    ids = [source.randrange(tok.vocab_size) for _ in range(source.randint(0, 24))]
    if name == "llama-spm" and source.random() < 0.5:  # bytes in a row: characters, and what is none
        ids = [source.randrange(3, 259) for _ in ids]
    text = streamed(tok, ids)
    assert text == tok.decode(ids, skip_special=False)
