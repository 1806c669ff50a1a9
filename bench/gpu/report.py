"""What parts say: lines of JSON in one file, each there as soon as it is known, so that a part that is killed has said
what it knew."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Report:
    """The file of one run, which its parts write in turn. `part` is whose lines are added."""

    def __init__(self, path: Path, part: str) -> None:
        self.path, self.part = path, part

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def add(self, name: str, value: Any, unit: str = "", **more: Any) -> None:
        """One result. `value` is a number, or text where there is nothing to measure."""
        self._write({"part": self.part, "name": name, "value": value, "unit": unit, **more})

    def fail(self, name: str, why: str, **more: Any) -> None:
        self._write({"part": self.part, "name": name, "failed": why, **more})

    def value(self, name: str) -> float | None:
        """What was measured under that name before, by any part; None where it was not."""
        found = [line["value"] for line in self.lines() if line["name"] == name and "value" in line]
        return found[-1] if found else None

    @contextmanager
    def trying(self, name: str) -> Iterator[None]:
        """What goes wrong within is written down, and the part goes on."""
        try:
            yield
        except Exception as e:  # of whatever kind: the next measurement may still be had
            self.fail(name, f"{type(e).__name__}: {e}"[:600], where=traceback.format_exc()[-1500:])

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as out:
            out.write(json.dumps(line) + "\n")
