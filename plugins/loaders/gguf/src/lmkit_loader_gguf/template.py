"""The chat template in the metadata of a GGUF file."""

from __future__ import annotations

from pathlib import Path

from lmkit.api import Checkpoint, ConfigError

from lmkit_loader_gguf.file import GgufFile

KEY = "tokenizer.chat_template"


def chat_template(file: Path, checkpoint: Checkpoint | None = None) -> str:
    """ "" where there is none. Raises CheckpointError, ConfigError."""
    found = GgufFile(file).metadata.get(KEY, "")
    if not isinstance(found, str):
        raise ConfigError(f"{file}: {KEY} is no text", fix="give another file with --chat-template")
    return found
