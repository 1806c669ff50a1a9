"""Where the last tokens of a text stood before: places that are alike are chained, the latest first."""

from __future__ import annotations

from array import array
from collections import OrderedDict

import numpy as np

BITS = 15  # of the table of chains
FACTOR = 0x9E3779B97F4A7C15  # odd, so that every token counts
MASK = (1 << 64) - 1
STEPS = 2  # times as many places are looked at as are wanted: some are alike by chance
FEW = 64  # new tokens that are chained one by one; more are chained at once
MOST_TOKENS = 1 << 22  # of all texts that are remembered here, 20 bytes each; the least recently read is forgotten


class Chained:
    """A text that grows. Each place knows the digest of the `shortest` tokens that end there, and the place before it
    whose digest falls into the same of 2 ** BITS chains. So a look-up walks over places that are likely right, and is
    bounded whatever the text is."""

    def __init__(self, shortest: int) -> None:
        self._shortest = shortest
        self.tokens = array("i")
        self.data = bytearray()  # of the tokens: what is compared in one piece takes half the time
        self._digests, self._before = array("Q"), array("i")  # of each place
        self._heads = array("i", [-1]) * (1 << BITS)

    def begins(self, text: np.ndarray) -> bool:
        """Whether `text` [n] goes on with this one."""
        num = len(self.tokens)
        return num <= len(text) and self.data == text[:num].data

    def grow(self, text: np.ndarray) -> None:
        """This text becomes `text`, with which it begins."""
        start, num = len(self.tokens), len(text)
        fresh = text[start:].tobytes()
        self.tokens.frombytes(fresh)
        self.data += fresh
        if num - start > FEW:
            self._chain_all()
            return
        tokens = text[max(0, start - self._shortest + 1) :].tolist()
        for place in range(start, num):
            end = len(tokens) - num + place + 1
            digest = 0
            for token in tokens[max(0, end - self._shortest) : end]:
                digest = (digest * FACTOR + token + 1) & MASK
            chain = digest * FACTOR >> (64 - BITS) & ((1 << BITS) - 1)
            self._digests.append(digest)
            self._before.append(self._heads[chain])
            self._heads[chain] = place

    def _chain_all(self) -> None:
        tokens = np.frombuffer(self.tokens, np.int32).astype(np.uint64)
        num, digests = len(tokens), np.zeros(len(tokens), np.uint64)
        for back in range(self._shortest - 1, -1, -1):
            digests[back:] = digests[back:] * np.uint64(FACTOR) + tokens[: num - back] + np.uint64(1)
        chains = (digests * np.uint64(FACTOR) >> np.uint64(64 - BITS)).astype(np.int64)
        order = np.argsort(chains, kind="stable")
        before, heads = np.full(num, -1, np.int32), np.full(1 << BITS, -1, np.int32)
        alike = chains[order[1:]] == chains[order[:-1]]
        before[order[1:][alike]] = order[:-1][alike]
        heads[chains[order]] = order
        self._digests, self._before, self._heads = array("Q"), array("i"), array("i")
        for kept, made in ((self._digests, digests), (self._before, before), (self._heads, heads)):
            kept.frombytes(made.tobytes())

    def latest(self, most: int) -> list[int]:
        """At most `most` earlier places where the last tokens end, `shortest` of them, the latest first."""
        digests, before = self._digests, self._before
        found: list[int] = []
        place, wanted = before[-1], digests[-1]
        for _ in range(STEPS * most):
            if place < 0 or len(found) == most:
                break
            if digests[place] == wanted:
                found.append(place)
            place = before[place]
        return found


class Texts:
    """The texts that were read lately, by where they lie in memory. What is found in one follows from the text alone:
    it is compared, and chained anew where another one lies there."""

    def __init__(self, shortest: int) -> None:
        self._shortest = shortest
        self._kept: OrderedDict[int, Chained] = OrderedDict()
        self._num = 0  # tokens of all

    def chained(self, text: np.ndarray) -> Chained:
        """`text` [n]."""
        address = text.__array_interface__["data"][0]
        found = self._kept.pop(address, None)
        if found is not None:
            self._num -= len(found.tokens)
        if found is None or not found.begins(text):
            found = Chained(self._shortest)
        found.grow(text)
        self._kept[address] = found
        self._num += len(found.tokens)
        while self._num > MOST_TOKENS and len(self._kept) > 1:
            self._num -= len(self._kept.popitem(last=False)[1].tokens)
        return found
