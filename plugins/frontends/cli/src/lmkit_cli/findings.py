"""A finding of `lmkit doctor`, whichever check made it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    area: str
    level: Level
    text: str
    fix: str = ""
