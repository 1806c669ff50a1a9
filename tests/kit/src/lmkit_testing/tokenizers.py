"""Tokenizers for tests: real ones where the test material is present, tiny ones built here."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
from lmkit_tokenizer_json.tokenizer import JsonTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

DATA = Path(__file__).resolve().parents[4].parent / "shared" / "data"


@pytest.fixture(scope="session")
def data() -> Path:
    if not DATA.is_dir():
        pytest.skip("the test material (shared/data) is not beside the repository")
    return DATA


@pytest.fixture(scope="session")
def real(data: Path) -> Callable[[str], JsonTokenizer]:
    made: dict[str, JsonTokenizer] = {}

    def load(name: str) -> JsonTokenizer:
        if name not in made:
            file = data / "tokenizers" / f"{name}_tokenizer.json"
            text = (
                file.read_bytes() if file.is_file() else gzip.decompress((file.parent / f"{file.name}.gz").read_bytes())
            )
            made[name] = JsonTokenizer(Tokenizer.from_str(text.decode()))
        return made[name]

    return load


@pytest.fixture(scope="session")
def byte_level() -> JsonTokenizer:
    """One token per byte, and three added tokens, one of them with a space."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|end|>", "<tool_call>"])
    raw.add_tokens([AddedToken("a b", special=False)])
    return JsonTokenizer(raw, eos_token="<|end|>")


@pytest.fixture(scope="session")
def sentencepiece_like() -> JsonTokenizer:
    """Words with U+2581 and byte fallback, decoded as Llama 2 does."""
    fallback = [f"<0x{b:02X}>" for b in range(256)]
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *fallback,
        "\u2581",
        "\u2581hello",
        "hello",
        "\u2581wor",
        "ld",
        "\u2581\u2581",
        ".",
    ]
    raw = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    return JsonTokenizer(raw, bos_token="<s>", eos_token="</s>")
