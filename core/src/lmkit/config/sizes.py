"""Sizes as people write them: "2GiB", "512 MB", "60%"; and back."""

from __future__ import annotations

import re

from lmkit.api import ConfigError

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)\s*$", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str, what: str = "size") -> int:
    """Bytes: "2GiB" = 2 * 1024**3, "2GB" = 2 * 1000**3, "2G" = "2GiB", "4096" = 4096. Raises ConfigError."""
    found = _SIZE.match(text)
    if not found or (found[3] and not found[2]):
        raise ConfigError(f"{what}: {text!r} is not a size", fix="write it as 2GiB, 512MB or 1073741824")
    number, unit, binary, byte = found.groups()
    base = 1000 if byte and not binary else 1024
    return int(float(number) * base ** _POWER[unit.lower()])


def parse_budget(text: str, free: int, what: str = "budget") -> int | None:
    """Bytes of a budget out of `free` bytes; None for "auto". Raises ConfigError."""
    text = text.strip()
    if text == "auto":
        return None
    if not text.endswith("%"):
        return parse_size(text, what)
    try:
        share = float(text[:-1])
    except ValueError:
        share = -1.0
    if not 0 < share <= 100:
        raise ConfigError(f"{what}: {text!r} is not a share", fix="write a share above 0% and up to 100%")
    return int(free * share / 100)


def format_size(nbytes: int) -> str:
    """For people: "1.50 GiB"."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
