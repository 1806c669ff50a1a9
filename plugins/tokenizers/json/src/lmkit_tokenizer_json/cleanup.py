"""Blanks before punctuation, which clean_up_tokenization_spaces of tokenizer_config.json takes out of decoded text."""

from __future__ import annotations

from lmkit.api import Detokenizer

_BEFORE = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")  # in transformers' order

_JOINING = (" ", " '", " n")  # one replacement, or two in turn, may join these with a blank that follows


def clean_up(text: str) -> str:
    """The text as transformers' clean_up_tokenization leaves it."""
    for written in _BEFORE:
        text = text.replace(written, written.strip())
    return text


class CleaningDetokenizer(Detokenizer):
    """Cleans what another detokenizer gives. The last word is held back, since its blank may have to go."""

    def __init__(self, inner: Detokenizer) -> None:
        self._inner, self._held = inner, ""

    def feed(self, token: int) -> str:
        known = max(1, len(self._held))  # no cut is possible before
        self._held += self._inner.feed(token)
        cut = self._held.rfind(" ", known)
        while cut > 0 and self._held[:cut].endswith(_JOINING):
            cut = self._held.rfind(" ", known, cut)
        if cut <= 0:
            return ""
        text, self._held = self._held[:cut], self._held[cut:]
        return clean_up(text)

    def flush(self) -> str:
        text, self._held = self._held + self._inner.flush(), ""
        return clean_up(text)
