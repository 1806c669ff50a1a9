"""How long a text is at least, in tokens, without tokenizing more of it than that.

A text is cut anywhere into pieces, and a cut makes a few tokens more of those that it goes through; so the sum over the
pieces says what the whole must have at least. It holds for every vocabulary, also where a tokenizer drops blanks or has
tokens of a hundred bytes, which no bound in bytes per token does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmkit.api import Tokenizer

PIECE = 1 << 15  # characters
USUAL = 8  # characters per token; texts that have fewer for each token allowed are simply tokenized
_CUT = 64  # tokens that a cut may add


def longer_than(tokenizer: Tokenizer, texts: Iterable[str], limit: int) -> bool:
    """Whether texts have more than `limit` tokens for sure. False where simply tokenizing them is cheap."""
    several = list(texts)
    if sum(map(len, several)) <= max(PIECE, USUAL * limit):
        return False
    count = 0
    for text in several:
        for _, num in _pieces(tokenizer, text):
            count += num
            if count > 2 * limit:  # twice: for what a cut might do to a vocabulary unlike any seen
                return True
    return False


def beginning(tokenizer: Tokenizer, text: str, limit: int) -> str:
    """A part of the text that has its first `limit` tokens."""
    if len(text) <= max(PIECE, USUAL * limit):
        return text
    count = 0
    for end, num in _pieces(tokenizer, text):
        count += num
        if count > 2 * limit:
            return text[:end]
    return text


def _pieces(tokenizer: Tokenizer, text: str) -> Iterator[tuple[int, int]]:
    """(end, tokens that it has at least) of each piece."""
    for at in range(0, len(text), PIECE):
        ids = tokenizer.encode(text[at : at + PIECE], add_special=False)
        yield at + PIECE, max(0, len(ids) - _CUT)
