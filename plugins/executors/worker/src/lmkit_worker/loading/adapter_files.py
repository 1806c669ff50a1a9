"""What a folder must be before an adapter is read from it: two regular files of bounded size. Imports no torch.

Whoever serves takes the path from a client, so nothing here follows `~`, waits for a pipe, or tells what else is there.
"""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from lmkit.api import CheckpointError
from lmkit.files import open_regular

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG = 1 << 20  # bytes
MAX_HEADER = 8 << 20  # bytes of names, shapes and places at the start of the weights
MAX_WEIGHTS = 64 << 30  # bytes, as long as the model is not known
CHUNK = 1 << 20


def check_files(path: Path, max_weights: int = MAX_WEIGHTS) -> None:
    """Raises CheckpointError, the same for all that is no adapter. Reads nothing but the size of the header."""
    if size_of(path / CONFIG) > MAX_CONFIG:
        raise CheckpointError(f"{CONFIG} has more than {MAX_CONFIG >> 20} MiB", fix="use what peft has written")
    size = size_of(path / WEIGHTS)
    if size > max_weights + MAX_HEADER:
        raise CheckpointError(
            f"{WEIGHTS} has {size} bytes, an adapter for this model has at most {max_weights}",
            fix="use an adapter made for this base model, or raise --max-lora-rank",
        )
    with opened(path / WEIGHTS) as file:
        header = int.from_bytes(file.read(8), "little")
    if header > min(MAX_HEADER, size):
        raise CheckpointError(f"{WEIGHTS} is damaged: its header says it has {header} bytes", fix="download it again")


def size_of(file: Path) -> int:
    with opened(file) as regular:
        return os.fstat(regular.fileno()).st_size


def opened(file: Path) -> BinaryIO:
    """A regular file of the adapter, for reading."""
    try:
        return open_regular(file)
    except (OSError, ValueError) as e:
        raise _missing(file.parent) from e


def digest(path: Path) -> str:
    """The digest of an adapter's content: 16 hex digits of SHA-256. Raises CheckpointError."""
    h = sha256()
    try:
        for name in (CONFIG, WEIGHTS):
            with opened(path / name) as file:
                while chunk := file.read(CHUNK):
                    h.update(chunk)
    except OSError as e:
        raise CheckpointError(f"the adapter cannot be read: {e.strerror}") from e
    return h.hexdigest()[:16]


def _missing(path: Path) -> CheckpointError:
    """Pickled weights are told of only where there is an adapter otherwise."""
    try:
        pickled = (path / CONFIG).is_file() and any(path.glob("*.bin"))
    except (OSError, ValueError):
        pickled = False
    if pickled:
        return CheckpointError(
            "the adapter has only pickled weights, which can execute code when read",
            fix="convert them to safetensors",
        )
    return CheckpointError(
        f"there is no adapter: it is a directory with {CONFIG} and {WEIGHTS}, both regular files that can be read",
        fix="give the directory of a PEFT adapter",
    )
