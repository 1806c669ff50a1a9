"""Control tokens that a client spells in its text stay text.

A rendered prompt is one string, in which `<|im_end|>` of the template and `<|im_end|>` typed by a user look the same.
The renderer knows whose each character is (lmkit_tokenizer_json.origin), and puts a MARK into every control token in which a
client's character takes part: whether it was typed as one, joined from several texts, or cut out of one. Tokenizing
(JsonTokenizer.encode_marked) takes the MARKs out again, after the tokenizer had its chance to find control tokens.

Where no template is run (ChatWriter) the texts are marked before they are written, also where a token may begin at
their ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lmkit_tokenizer_json.origin import OURS, THEIRS, ClientText, origins

Fold = Callable[[str], str]

MARK = "\ufdd0"  # a noncharacter: no text needs it
_ROUNDS = 64


def breaker(control_tokens: Iterable[str], fold: Fold | None = None) -> Callable[[str], str]:
    """A function that marks the control tokens of a text that are not wholly the template's. It gives a plain str.

    `fold`: what the tokenizer makes of a text before it looks for such tokens.
    """
    names = {t for t in control_tokens if len(t) > 1}
    pattern = _pattern(names)
    folded = _pattern(names | {fold(t) for t in names}) if fold is not None else None

    def spans(text: str) -> Iterator[tuple[int, int]]:
        if pattern is not None:
            yield from (found.span() for found in pattern.finditer(text))
        if fold is not None and folded is not None:
            seen, places = _folded(text, fold)
            yield from ((places[m.start()], places[m.end() - 1] + 1) for m in folded.finditer(seen))

    def broken(text: str) -> str:
        whose = origins(text)
        plain = str.__str__(text)
        for _ in range(_ROUNDS):  # again where one overlaps another
            if THEIRS not in whose:
                break
            found = [span for span in spans(plain) if THEIRS in whose[slice(*span)]]
            cuts = sorted({_cut(whose, *span) for span in found})
            if not cuts:
                break
            pieces = list(zip([0, *cuts], [*cuts, len(plain)], strict=True))
            plain = MARK.join(plain[a:b] for a, b in pieces)
            whose = THEIRS.join(whose[a:b] for a, b in pieces)
        return plain

    return broken


def _folded(text: str, fold: Fold) -> tuple[str, list[int]]:
    """The folded text, and from which character each of its characters comes."""
    start = fold("x")
    table = {char: fold("x" + char).removeprefix(start) for char in set(text)}  # some put a blank before a text
    places = [at for at, char in enumerate(text) for _ in table[char]]
    return "".join(map(table.__getitem__, text)), places


def _cut(whose: bytes, begin: int, end: int) -> int:
    """Where the token at begin:end is broken: not inside of what the template wrote, which may be a token itself."""
    other = THEIRS if whose[begin : begin + 1] == OURS else OURS
    at = whose.find(other, begin, end)
    return at if at >= 0 else begin + 1


def marker(control_tokens: Iterable[str], fold: Fold | None = None) -> Callable[[Any], Any]:
    """A function that marks every text in a JSON value, keys included: none of them, nor two joined, has a token."""
    names = [t for t in control_tokens if len(t) > 1]
    broken = breaker(names, fold)
    begun = frozenset(name[:k] for name in names for k in range(1, len(name)))
    longest = max(map(len, begun), default=0)

    def mark(value: Any) -> Any:
        if isinstance(value, str):
            text = broken(ClientText(value))
            end = len(text.rstrip())
            for at in range(end - 1, max(end - longest, 0) - 1, -1):
                if text[at:end] in begun:
                    text, end = text[: at + 1] + MARK + text[at + 1 :], end + 1
            return text
        if isinstance(value, dict):
            return {mark(k): mark(v) for k, v in value.items()}
        return [mark(v) for v in value] if isinstance(value, list) else value

    return mark


def _pattern(tokens: Iterable[str]) -> re.Pattern[str] | None:
    names = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names))) if names else None


def shown(text: str) -> str:
    """A marked text as people should see it."""
    return text.replace(MARK, "")
