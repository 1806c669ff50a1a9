"""One text out of the metadata of a GGUF file (versions 2 and 3, little-endian; ggml/docs/gguf.md).

magic, version, number of tensors, number of pairs, then the pairs: key, type, value. Vocabularies stand among them, so
values that are not wanted are passed over and not read.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from lmkit.api import ConfigError

KEY = "tokenizer.chat_template"
STRING, ARRAY = 8, 9
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a number, by its type


def chat_template(file: Path) -> str:
    """Raises ConfigError."""
    try:
        with file.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = _find(data)
    except OSError as e:
        raise ConfigError(f"cannot read the chat template {file}: {e.strerror}", fix="check the path") from e
    except (ValueError, struct.error, OverflowError) as e:
        raise ConfigError(f"{file} is not a GGUF file: {e}", fix="download it again") from e
    if found is None:
        raise ConfigError(f"{file} holds no chat template ({KEY})", fix="give another file with --chat-template")
    return found


def _find(data: mmap.mmap) -> str | None:
    """Raises ValueError, struct.error, OverflowError."""
    magic, version, _, num_pairs = struct.unpack_from("<4sIQQ", data)
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"it begins with {magic!r}, version {version}")
    at = 24
    for _ in range(num_pairs):
        key, at = _text(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        if key == KEY.encode():
            if kind != STRING:
                raise ValueError(f"{KEY} is no text")
            return _text(data, at + 4)[0].decode()
        at = _skip(data, at + 4, kind)
    return None


def _text(data: mmap.mmap, at: int) -> tuple[bytes, int]:
    """A text, and where it ends."""
    (size,) = struct.unpack_from("<Q", data, at)
    end = at + 8 + size
    if end > len(data):
        raise ValueError("it is cut off")
    return data[at + 8 : end], end


def _skip(data: mmap.mmap, at: int, kind: int) -> int:
    """Where the value ends."""
    if kind == STRING:
        return at + 8 + struct.unpack_from("<Q", data, at)[0]
    if kind != ARRAY:
        return at + _size(kind)
    of, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if of != STRING:
        return at + count * _size(of)
    for _ in range(count):
        at += 8 + struct.unpack_from("<Q", data, at)[0]
    return at


def _size(kind: int) -> int:
    if kind not in SIZES:
        raise ValueError(f"a value of type {kind}")
    return SIZES[kind]
