"""The chat template that stands in place of the checkpoint's own ones. No Jinja here: it is read, not run."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from lmkit.api import Checkpoint, Choice, ConfigError, owner_of
from lmkit.plugins.refs import ask, load_target


def chosen_template(choices: Iterable[Choice], file: str | None, checkpoint: Checkpoint) -> str | None:
    """What stands in place of the checkpoint's own templates: that of the `file` which the user names, or of a plugin.

    A file that no plugin reads is text. Raises ConfigError, or PluginError.
    """
    if (choice := next((c for c in choices if c.kind == "template"), None)) is not None:
        make = partial(load_target(choice), Path(file or checkpoint.path), checkpoint, **choice.options)
        found: str = ask(owner_of(choice), make, gives=str)
        if file and not found.strip():
            raise _no_template(file)
        return found or None
    if not file:
        return None
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"cannot read the chat template {file}: {e.strerror}", fix="check the path") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"the chat template {file} is not text: {e.reason}", fix="give a UTF-8 text file") from e
    if not text.strip():
        raise _no_template(file)
    return text


def _no_template(file: str) -> ConfigError:
    return ConfigError(
        f"{file} holds no chat template",
        fix="give another file with --chat-template, or leave it out for the checkpoint's own template",
    )
