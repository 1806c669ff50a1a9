"""Checkpoints with tekken.json and no tokenizer.json get their tokenizer here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkit.api import hookimpl

if TYPE_CHECKING:
    from lmkit.api import Checkpoint, Tokenizer


@hookimpl
def lmkit_load_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    file = checkpoint.path / "tekken.json"
    if not file.is_file() or (checkpoint.path / "tokenizer.json").is_file():
        return None
    from lmkit_tokenizer_mistral.tekken import Tekken

    return Tekken(file)
