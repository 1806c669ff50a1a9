"""Files of checkpoints, read with care: they are data from a stranger."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from lmkit.api import CheckpointError

MAX_FILE = 256 << 20  # bytes
# Fields of tokenizer_config.json that name one token each, in the order in which transformers adds such tokens.
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CACHED = re.compile(r"/models--[^/]+/(blobs|snapshots)/")  # a file in a hub's cache


def chat_templates(path: Path) -> dict[str, str]:
    """Those beside the weights, by name: "default" where there is one, "tool_use" and others. Raises CheckpointError.

    Files of their own come before fields of the tokenizer's configuration.
    """
    value = read_object(path / "tokenizer_config.json").get("chat_template")
    value = value or read_object(path / "chat_template.json").get("chat_template")
    if isinstance(value, list):  # several named templates
        pairs = [(v.get("name"), v.get("template")) for v in value if isinstance(v, Mapping)]
        found = {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    else:
        found = {"default": value} if isinstance(value, str) else {}
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in (path / "additional_chat_templates").glob("*.jinja")}
    found |= {name: read_own(file, path).decode(errors="replace") for name, file in files.items() if file.is_file()}
    if found and "default" not in found:
        found["default"] = found.get("tool_use") or next(iter(found.values()))
    return found


def tokenizer_settings(path: Path) -> dict[str, Any]:
    """The fields of tokenizer_config.json and special_tokens_map.json together. Raises CheckpointError.

    The map comes first only where the configuration is so old that it has no added_tokens_decoder, as in transformers.
    """
    config, special_map = read_object(path / "tokenizer_config.json"), read_object(path / "special_tokens_map.json")
    return config | special_map if config.get("added_tokens_decoder") is None else special_map | config


def read_own(file: Path, folder: Path | None = None) -> bytes:
    """A file in the `folder` of a checkpoint (default: the one it is in). Raises CheckpointError, see `check_own`."""
    check_own(file, folder)
    try:
        with open_regular(file) as opened:
            if os.fstat(opened.fileno()).st_size > MAX_FILE:
                raise CheckpointError(f"{file} has more than {MAX_FILE >> 20} MiB", fix="download it again")
            return opened.read()
    except OSError as e:
        raise CheckpointError(f"{file} cannot be read: {e}", fix="download it again") from e


def check_own(file: Path, folder: Path | None = None) -> None:
    """Raises CheckpointError for what is not a regular file in `folder` (default: the one it is in).

    So is a link that leads elsewhere: clients may be shown a prompt, and with it any file that the server can read. A
    hub's cache is no elsewhere: there, every file is a link.
    """
    try:
        target = file.resolve(strict=True)
        inside = target.is_relative_to((folder or file.parent).resolve()) or _CACHED.search(target.as_posix())
        regular = stat.S_ISREG(target.stat().st_mode)
    except (OSError, RuntimeError) as e:  # RuntimeError: links in a circle
        raise CheckpointError(f"{file} cannot be read: {e}", fix="download it again") from e
    if not inside:
        raise CheckpointError(f"{file} is a link to {target}, outside of the checkpoint", fix="copy the file")
    if not regular:
        raise CheckpointError(f"{file} is not a regular file", fix="download it again")


def open_regular(file: Path | str) -> BinaryIO:
    """A regular file, for reading. Raises OSError for another, and never waits for whoever writes a pipe."""
    fd = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(file))
    return os.fdopen(fd, "rb")


def read_object(file: Path) -> dict[str, Any]:
    """A JSON object, {} when there is no file. Raises CheckpointError when it holds something else."""
    if not file.is_file():
        return {}
    try:
        data = json.loads(read_own(file))
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{file} is not JSON: {e}", fix="download it again") from e
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} is not a JSON object", fix="download it again")
    return data


def content_of(token: Any) -> str:
    """Special tokens are written as a string or as {"content": ...}."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else ""
