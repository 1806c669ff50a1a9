"""Options of the dialect."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    dir: str = ""  # where files and batches are kept; "": there are none
    max_mb: int = 4096  # of all files together

    def __post_init__(self) -> None:
        if self.max_mb < 1:
            raise ValueError("max_mb is at least 1")
