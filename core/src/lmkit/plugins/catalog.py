"""What can be installed: the official plugins by kind and name, and the folder of each dist. For hints."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

import lmkit

CORE_DIST = "lmkit-core"
CHECKOUT = Path(lmkit.__file__).resolve().parents[3]  # where this core is used from a checkout of the repository


@cache
def _catalog() -> dict[str, Any]:
    """The file is written by tools/sync.py."""
    data: Any = msgspec.json.decode(resources.files("lmkit.plugins").joinpath("catalog.json").read_bytes())
    return data


def folders() -> dict[str, str]:
    """{dist: its folder in the repository}."""
    found: dict[str, str] = _catalog()["folders"]
    return found


def catalog() -> dict[str, dict[str, str]]:
    """{kind: {name: dist}}."""
    kinds: dict[str, dict[str, str]] = _catalog()["kinds"]
    return kinds


def install(dist: str, extra: str = "") -> str:
    """The command that installs one of lmkit's own dists: by its folder, for no registry is known to have them.

    Whoever has no checkout is told the folder's path in one.
    """
    folder = folders()[dist]
    here = CHECKOUT / folder
    path = here if (here / "pyproject.toml").is_file() else Path(folder)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    wanted = f"'{path}[{extra}]'" if extra else str(path)
    return f"pip install -e {wanted}" + ("" if path.exists() else ", in a checkout of lmkit's repository")


def install_command(kind: str, name: str) -> str:
    """`pip install ...` for an official plugin that is not installed; "" when there is none of that name."""
    dist = catalog().get(kind, {}).get(name)
    return install(dist) if dist else ""
