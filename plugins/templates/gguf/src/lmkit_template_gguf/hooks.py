"""`--chat-template FILE.gguf`."""

from __future__ import annotations

from pathlib import Path

from lmkit.api import hookimpl


@hookimpl
def lmkit_read_template(file: Path) -> str | None:
    """Raises ConfigError."""
    if file.suffix.lower() != ".gguf":
        return None
    from lmkit_template_gguf.metadata import chat_template

    return chat_template(file)
