"""What is kept of texts: a bounded number of pieces, the oldest of which are forgotten."""

from __future__ import annotations

from array import array

import numpy as np

PIECE = 64  # tokens
BEFORE = 8  # tokens before a piece that are kept with it: its first tokens can then be guessed
MOST_NEW = 4  # pieces of a text that are kept at once: what a prompt brings must not push all others out


class Pieces:
    """Texts in pieces that begin at multiples of PIECE, so that a text that comes again, grown, is known as far as it
    was: nobody has to say which row it is of. Places are found by the tokens that end there."""

    width = 1 + BEFORE + PIECE  # the first is no token: there a run ends

    def __init__(self, room: int, shortest: int, most: int) -> None:
        """`room`: tokens, what stands before pieces not counted. Places are known by `shortest` tokens that end there,
        the latest `most` of those that are alike."""
        self.tokens = array("i", [-1]) * (room // PIECE * self.width)  # of all pieces, one behind the other
        self._rows = np.frombuffer(self.tokens, np.int32).reshape(-1, self.width)
        self._shortest, self._most = shortest, most
        self._of: dict[bytes, int] = {}  # content of a piece -> its row
        self._contents = [b""] * len(self._rows)
        self._places: dict[bytes, list[int]] = {}  # tokens -> places in `tokens` where they end
        self._next = 0

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
        if self._contents[row]:
            del self._of[self._contents[row]]
            for place, key in self._keys(row):
                if (places := self._places.get(key)) and places[0] == place:  # else others came later than all that
                    del places[0]
                    if not places:
                        del self._places[key]
        self._of[content], self._contents[row] = row, content
        self._rows[row] = -1  # no token
        self._rows[row, self.width - len(tokens) :] = tokens
        for place, key in self._keys(row):
            places = self._places.setdefault(key, [])
            places.append(place)
            if len(places) > self._most:
                del places[0]

    def _keys(self, row: int) -> list[tuple[int, bytes]]:
        """The places of a piece, and the tokens that end there."""
        begin, data, size = row * self.width, self._rows[row].tobytes(), 4 * self._shortest
        first = int(np.argmax(self._rows[row] >= 0)) + self._shortest
        return [(begin + end - 1, data[4 * end - size : 4 * end]) for end in range(first, self.width + 1)]

    def agreeing(self, last: np.ndarray) -> list[int]:
        """Places where the tokens `last` [shortest] end, the latest first."""
        return self._places.get(last.tobytes(), [])[::-1]

    def after(self, end: int, most: int) -> list[int]:
        """At most `most` tokens behind place `end` of `tokens`; those of the next piece too, if it continues."""
        row, column = divmod(end, self.width)
        found = self._rows[row, column + 1 : column + 1 + most].tolist()
        after = (row + 1) % len(self._rows)
        if len(found) < most and np.array_equal(self._rows[row, -BEFORE:], self._rows[after, 1 : 1 + BEFORE]):
            found += self._rows[after, 1 + BEFORE : 1 + BEFORE + most - len(found)].tolist()
        return found
