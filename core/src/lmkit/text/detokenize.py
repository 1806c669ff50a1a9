"""Token ids to text, incrementally. The deltas join to the full decode, and never hold half a character.

Byte-level vocabularies are a table from id to bytes and an incremental UTF-8 decoder. All others decode a small window
of recent tokens and emit the difference; a run of byte-fallback tokens is decoded when it ends, because only the whole
run says whether it is valid text.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """feed(token) -> the text that became certain; flush() -> the rest, as a full decode would show it."""

    def feed(self, token: int) -> str: ...
    def flush(self) -> str: ...


class BytesDetokenizer:
    """`piece(token)` gives the bytes of a token; b"" for tokens that are not shown."""

    __slots__ = ("_decode", "_piece")

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decode = _utf8("replace").decode

    def feed(self, token: int) -> str:
        return self._decode(self._piece(token))

    def flush(self) -> str:
        return self._decode(b"", True)


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
