"""Templates out of GGUF files: small ones made here, and a real vocabulary."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from lmkit.api import CheckpointError, ConfigError
from lmkit_loader_gguf.template import chat_template
from lmkit_testing import TemplateConformance
from lmkit_tokenizer_json.render import Renderer


class TestGgufTemplate(TemplateConformance):
    plugin = "template:gguf"

    def file(self, folder: Path) -> tuple[Path, str]:
        (folder / "model.gguf").write_bytes(gguf(*OTHERS, TEMPLATE))
        return folder / "model.gguf", "{{ messages[0].content }} é"


REAL = Path(__file__).resolve().parents[4].parent / "shared" / "data" / "tokenizers" / "ggml-vocab-phi-3.gguf"


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


TEMPLATE = pair("tokenizer.chat_template", 8, text("{{ messages[0].content }} é"))
OTHERS = (
    pair("general.name", 8, text("x")),
    pair("a.flag", 7, b"\1"),
    pair("a.number", 12, struct.pack("<d", 0.5)),
    pair("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 3) + text("a") + text("") + text("日本")),
    pair("tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, 2) + bytes(8)),
)


def gguf(*pairs: bytes, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return struct.pack("<4sIQQ", magic, version, 0, len(pairs)) + b"".join(pairs)


def read(tmp_path: Path, data: bytes) -> str | None:
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    return chat_template(file)


@pytest.mark.parametrize("at", range(len(OTHERS) + 1))
def test_the_template_is_found_wherever_it_stands(tmp_path: Path, at: int) -> None:
    assert read(tmp_path, gguf(*OTHERS[:at], TEMPLATE, *OTHERS[at:])) == "{{ messages[0].content }} é"


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    good = gguf(*OTHERS, TEMPLATE)
    for size in range(len(good)):
        with pytest.raises((CheckpointError, ConfigError), match=r"model\.gguf"):
            read(tmp_path, good[:size])
    huge = pair("x", 9, struct.pack("<IQ", 8, 1 << 60))
    nested = pair("x", 9, struct.pack("<IQ", 9, 1))
    number = pair("tokenizer.chat_template", 4, bytes(4))
    for data in (gguf(huge, TEMPLATE), gguf(nested, TEMPLATE), gguf(number), gguf(TEMPLATE, magic=b"GGML")):
        with pytest.raises((CheckpointError, ConfigError), match=r"model\.gguf"):
            read(tmp_path, data)


@pytest.mark.parametrize("size", [1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_sizes_beyond_the_file_are_refused(tmp_path: Path, size: int) -> None:
    number = struct.pack("<Q", size)
    for data in (
        gguf(pair("x", 8, number), TEMPLATE),
        gguf(pair("x", 9, struct.pack("<IQ", 12, size)), TEMPLATE),
        gguf(pair("x", 9, struct.pack("<IQ", 8, size) + number), TEMPLATE),
        gguf(number, TEMPLATE),
        gguf(pair("tokenizer.chat_template", 8, number)),
    ):
        with pytest.raises((CheckpointError, ConfigError), match=r"model\.gguf"):
            read(tmp_path, data + bytes(64))


def test_a_file_without_a_template_or_none_at_all(tmp_path: Path) -> None:
    assert read(tmp_path, gguf(*OTHERS)) == ""
    with pytest.raises(CheckpointError, match="cannot be read"):
        chat_template(tmp_path / "none.gguf")


def test_a_real_file() -> None:
    if not REAL.is_file():
        pytest.skip("GGUF vocabularies are not beside the repository (../shared/data/tokenizers)")
    source = chat_template(REAL)
    assert source is not None
    prompt = Renderer(source, {"bos_token": "<s>", "eos_token": "</s>"}).render([{"role": "user", "content": "Hello"}])
    assert "<|user|>" in prompt
    assert "Hello" in prompt
