"""What is kept of texts: a bounded number of pieces, the oldest of which are forgotten."""

from __future__ import annotations

import numpy as np

PIECE = 64  # tokens
BEFORE = 8  # tokens before a piece that are kept with it: its first tokens can then be guessed
MOST_NEW = 4  # pieces of a text that are kept at once: what a prompt brings must not push all others out


class Pieces:
    """Texts in pieces that begin at multiples of PIECE, so that a text that comes again, grown, is known as far as it
    was: nobody has to say which row it is of."""

    width = BEFORE + PIECE

    def __init__(self, room: int) -> None:
        """`room`: tokens, what stands before pieces not counted."""
        self._rows = np.full((room // PIECE, self.width), -1, np.int32)
        self._of: dict[bytes, int] = {}  # content of a piece -> its row
        self._contents = [b""] * len(self._rows)
        self._next = 0
        self.tokens = self._rows.reshape(-1)[:0]  # those of all pieces, [num_pieces * width]

    def keep(self, text: np.ndarray) -> None:
        """What `text` [n] has beyond the pieces that are known."""
        if not len(self._rows):
            return
        whole = len(text) // PIECE * PIECE
        new = []
        for start in range(whole - PIECE, max(-1, whole - PIECE * (MOST_NEW + 1)), -PIECE):
            content = text[start : start + PIECE].tobytes()
            if content in self._of:
                break
            new.append((start, content))
        for start, content in reversed(new):
            self._put(text[max(0, start - BEFORE) : start + PIECE], content)

    def _put(self, tokens: np.ndarray, content: bytes) -> None:
        row = self._next
        self._next = (row + 1) % len(self._rows)
        self._of.pop(self._contents[row], None)
        self._of[content], self._contents[row] = row, content
        self._rows[row] = -1  # no token
        self._rows[row, self.width - len(tokens) :] = tokens
        self.tokens = self._rows.reshape(-1)[: max(len(self.tokens), (row + 1) * self.width)]

    def after(self, end: int, most: int) -> list[int]:
        """At most `most` tokens behind place `end` of `tokens`; those of the next piece too, if it continues."""
        row, column = divmod(end, self.width)
        found = self._rows[row, column + 1 : column + 1 + most].tolist()
        after = (row + 1) % len(self._rows)
        if len(found) < most and np.array_equal(self._rows[row, -BEFORE:], self._rows[after, :BEFORE]):
            found += self._rows[after, BEFORE : BEFORE + most - len(found)].tolist()
        return found
