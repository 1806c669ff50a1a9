"""Files that are there whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """The file is there whole, or not at all: `write` gets a name beside it."""
    part = path.with_name(f"{path.name}.part")
    write(part)
    os.replace(part, path)
