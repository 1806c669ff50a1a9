"""Where an output stands, followed by token ids: before, inside or after its thinking.

    start ---- open ----> thinking ---- close ----> body
      `-- anything else --------------------------> body

The markers and whether the prompt has opened the thinking come from the text side (`lmkit.api.Thinking`), which reads
the same markers in the text. So both agree where the body, which a grammar constrains, begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from lmkit.api import GrammarError, Thinking, Vocabulary

Phase = Literal["start", "thinking", "body"]
State = tuple[Phase, bytes, int]
_BLANK = b" \t\r\n"


class MarkerTable:
    """What is to be known of the markers in a vocabulary. Shared by all requests with the same markers."""

    def __init__(self, thinking: Thinking, vocab: Vocabulary, ends: Sequence[int]) -> None:
        """`ends`: ids that end an output, which must not happen before the body. Raises GrammarError."""
        self.open, self.close, self.until = (
            tuple(text.encode() for text in texts) for texts in (thinking.open, thinking.close, thinking.until)
        )
        self.pieces = vocab.pieces
        self._by_start: dict[int, list[int]] = {}
        for token, piece in enumerate(vocab.pieces):
            if piece:
                self._by_start.setdefault(piece[0], []).append(token)
        for marker in (*self.open, *self.close):
            if any(byte not in self._by_start for byte in marker):
                raise GrammarError(f"the vocabulary cannot spell {marker.decode()!r}")
        shown = [t for t, piece in enumerate(vocab.pieces) if piece and not self._is_ill(piece)]
        self._free = bit_mask(vocab.size, set(shown).difference(ends))
        self._size = vocab.size
        self._masks: dict[tuple[str, bytes], np.ndarray] = {}  # as many as markers have beginnings

    def tail(self, seen: bytes) -> bytes:
        """The longest end of `seen` that begins a marker: all that has to be remembered."""
        markers = (*self.close, *self.until)
        for length in range(min(len(seen), max(map(len, markers)) - 1), 0, -1):
            if any(m.startswith(seen[-length:]) for m in markers):
                return seen[-length:]
        return b""

    def closes(self, seen: bytes) -> bool:
        return any(marker in seen for marker in self.close)

    def opens(self, spelt: bytes) -> Literal["yes", "no", "begins"]:
        if spelt in self.open:
            return "yes"
        return "begins" if any(marker.startswith(spelt) for marker in self.open) else "no"

    def allowed(self, tail: bytes) -> np.ndarray:
        """In the thinking, after `tail`: everything but ends, `until` markers, and a `close` with text behind it."""
        return self._free if not tail else self._cached("allowed", tail)

    def opening(self, tail: bytes) -> np.ndarray:
        """Tokens that spell more of a marker that opens, after `tail`."""
        return self._cached("opening", tail)

    def closing(self, tail: bytes) -> np.ndarray:
        """The token that spells most of the first marker that closes, after `tail`."""
        return self._cached("closing", tail)

    def _cached(self, what: str, tail: bytes) -> np.ndarray:
        mask = self._masks.get((what, tail))
        if mask is None:
            if what == "allowed":
                mask = self._free & ~bit_mask(self._size, self._ill(tail))
            elif what == "opening":
                rests = [marker[len(tail) :] for marker in self.open if marker.startswith(tail)]
                mask = bit_mask(self._size, [token for rest in rests for token in self._spelling(rest)])
            else:
                rest = self.close[0][len(tail) if self.close[0].startswith(tail) else 0 :]
                mask = bit_mask(self._size, [max(self._spelling(rest), key=lambda t: len(self.pieces[t]))])
            self._masks[what, tail] = mask
        return mask

    def _spelling(self, text: bytes) -> list[int]:
        return [t for t in self._by_start[text[0]] if text.startswith(self.pieces[t])]

    def _ill(self, tail: bytes) -> list[int]:
        """Tokens that complete a marker begun by `tail` in a way that is not allowed."""
        found: list[int] = []
        for marker in (*self.close, *self.until):
            for length in range(1, min(len(tail), len(marker) - 1) + 1):
                if marker.startswith(tail[-length:]):
                    begun = self._by_start.get(marker[length], ())
                    found += [t for t in begun if self._is_ill(tail[-length:] + self.pieces[t])]
        return found

    def _is_ill(self, text: bytes) -> bool:
        """Whether `text` ends the thinking other than by `close` and blanks."""
        if any(marker in text for marker in self.until):
            return True
        after = [text.partition(marker)[2] for marker in self.close]
        return any(rest.strip(_BLANK) for rest in after)


def bit_mask(size: int, ids: Iterable[int]) -> np.ndarray:
    """[ceil(size / 32)] int32 with the bits of `ids` set."""
    bits = np.zeros(-(-size // 32) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4")


class Channel:
    """The position of one output. `feed` moves it by one token, `state` and `restore` take it back."""

    __slots__ = ("_budget", "_table", "num_thinking", "phase", "tail")

    def __init__(self, table: MarkerTable, thinking: Thinking) -> None:
        self._table, self._budget = table, thinking.budget
        self.phase: Phase = "thinking" if thinking.inside else "start" if thinking.open else "body"
        self.tail = b""  # the end of what was written that begins a marker
        self.num_thinking = 0  # tokens

    @property
    def state(self) -> State:
        return self.phase, self.tail, self.num_thinking

    def restore(self, state: State) -> None:
        self.phase, self.tail, self.num_thinking = state

    def may_be_body(self, token: int) -> bool:
        """At the very start, a token that only begins a marker is of the body if the grammar takes it."""
        return self.phase == "start" and not self.tail and self._piece(token) not in self._table.open

    def feed(self, token: int) -> bool:
        """Moves past `token`. True when the token belongs to the body."""
        if self.phase == "body":
            return True
        table = self._table
        piece = self._piece(token)
        if self.phase == "start":
            opens = table.opens(self.tail + piece) if piece else "no"
            if opens == "no":
                self.phase = "body"
                return True  # the mask lets nothing else through once a marker has begun
            self.phase, self.tail = ("thinking", b"") if opens == "yes" else ("start", self.tail + piece)
            return False
        self.num_thinking += 1
        seen = self.tail + piece
        if table.closes(seen):
            self.phase, self.tail = "body", b""
        else:
            self.tail = table.tail(seen)
        return False

    def _piece(self, token: int) -> bytes:
        return self._table.pieces[token] if token < len(self._table.pieces) else b""

    @property
    def spent(self) -> bool:
        """The thinking has used its budget: the end of it is all that may come."""
        return self.phase == "thinking" and self._budget is not None and self.num_thinking >= self._budget

    def mask(self) -> np.ndarray | None:
        """What may come next before the body; None: that is for the grammar to say."""
        if self.spent:
            return self._table.closing(self.tail)
        if self.phase == "thinking":
            return self._table.allowed(self.tail)
        return self._table.opening(self.tail) if self.tail else None

    def opening(self) -> np.ndarray | None:
        """Before anything was written: the tokens that begin to open the thinking."""
        return self._table.opening(b"") if self.phase == "start" else None
