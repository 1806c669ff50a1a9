"""What can be installed: kind -> name -> dist of the official plugins, for hints and the official mark."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import msgspec

CORE_DIST = "lmkit-core"


@cache
def catalog() -> dict[str, dict[str, str]]:
    """{kind: {name: dist}}; the file is written by tools/sync.py."""
    data: Any = msgspec.json.decode(resources.files("lmkit.plugins").joinpath("catalog.json").read_bytes())
    return data


@cache
def official_dists() -> frozenset[str]:
    return frozenset({CORE_DIST, *(dist for names in catalog().values() for dist in names.values())})


def install_command(kind: str, name: str) -> str:
    """`pip install ...` for an official plugin that is not installed; "" when there is none of that name."""
    dist = catalog().get(kind, {}).get(name)
    return f"pip install {dist}" if dist else ""
