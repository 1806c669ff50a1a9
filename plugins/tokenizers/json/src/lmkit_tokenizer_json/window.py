"""Token ids to text, incrementally, for vocabularies that are no table from id to bytes.

A small window of recent tokens is decoded, and the difference emitted; a run of byte-fallback tokens is decoded when it
ends, because only the whole run says whether it is valid text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class WindowDetokenizer:
    """For any decoder: `decode(ids)`, `hidden(token)` and `is_byte(token)` describe the vocabulary."""

    __slots__ = ("_decode", "_hidden", "_is_byte", "_shown", "_waiting", "_window")

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        hidden: Callable[[int], bool],
        is_byte: Callable[[int], bool],
        context: Sequence[int] = (),
    ) -> None:
        self._decode, self._hidden, self._is_byte = decode, hidden, is_byte
        # tokens already shown that the next ones may join to
        self._window = [t for t in context if not hidden(t)]
        self._waiting: list[int] = []  # tokens not yet shown
        self._shown = decode(self._window) if self._window else ""  # decode(window)

    def feed(self, token: int) -> str:
        if self._hidden(token):
            return ""
        self._waiting.append(token)
        return "" if self._is_byte(token) else self._release()

    def flush(self) -> str:
        return self._release() if self._waiting else ""

    def _release(self) -> str:
        text = self._decode(self._window + self._waiting)
        delta = text[len(self._shown) :]
        if delta:  # a token without text stays, so that the window never becomes empty at the start
            self._window, self._waiting = self._waiting, []
            self._shown = self._decode(self._window)
        return delta
