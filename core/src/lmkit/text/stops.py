"""Stop strings in a stream of text, whatever the token borders.

The match that ends first wins, and of those the longest, so the answer does not depend on how the text was split.
Text that may be the beginning of a stop string is held back until it is decided.
"""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    """Finds stop strings: feed(text) -> (text that is safe to emit, the stop string found or None)."""

    __slots__ = ("_held", "_include", "_prefixes", "_reach", "_strings")

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        self._strings = tuple(strings)
        self._include = include
        self._prefixes = frozenset(s[:k] for s in strings for k in range(1, len(s)))
        self._reach = max(map(len, strings), default=1) - 1
        self._held = ""

    @property
    def pending(self) -> int:
        """Characters that are held back because they may begin a stop string."""
        return len(self._held)

    def feed(self, text: str, exempt: int = 0) -> tuple[str, str | None]:
        """A stop string that ends within the first `exempt` characters of `text` does not count. One that begins there
        and ends behind them does."""
        if not self._strings or not text:
            return text, None
        seen = len(self._held) + exempt
        text = self._held + text
        found = self._first(text, seen)
        if found is not None:
            self._held = ""
            end, stop = found
            return text[: end if self._include else end - len(stop)], stop
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, seen: int) -> tuple[int, str] | None:
        """The end of the first stop string that ends behind `seen` characters, and the string."""
        best: tuple[int, int, str] | None = None  # end, -length, string
        for stop in self._strings:
            # a longer stop must not be looked for beyond the best end: that keeps the search linear
            at = text.find(stop, max(0, seen - len(stop) + 1), best[0] if best else len(text))
            if at >= 0 and (best is None or (at + len(stop), -len(stop)) < best[:2]):
                best = (at + len(stop), -len(stop), stop)
        return None if best is None else (best[0], best[2])

    def _undecided(self, text: str) -> int:
        """Length of the longest tail of `text` that begins a stop string."""
        for k in range(min(self._reach, len(text)), 0, -1):
            if text[-k:] in self._prefixes:
                return k
        return 0
