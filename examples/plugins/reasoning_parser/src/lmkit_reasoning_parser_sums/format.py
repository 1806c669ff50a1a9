"""A format with a parser of its own. One that is two markers around the reasoning, as most are, needs no code: see the
scaffold of `lmkit plugins new reasoning_parser`, a declaration that the library lmkit_formats runs."""

import re

from lmkit.api import Reasoning, Text

OTHER = re.compile(r"[^\d\s+*/().-]")  # what is no part of a sum
LONGEST = 200  # characters; what is longer is no sum, and nobody waits for it


class Sums:
    """Contract: lmkit.api.ParserFormat."""

    name = "sums"
    keep_special = frozenset()  # no marker is a special token of the vocabulary, which decoding would drop

    def start(self, prompt_tail, tools):
        """`prompt_tail` says whether the prompt ended within reasoning; this format never does."""
        return SumsParser()

    def grammar(self, tools, choice):
        """None, as calls of tools are another format's."""


class SumsParser:
    """Contract: lmkit.api.StreamParser. However a text is cut into pieces, the message is the same: what may yet become
    the working of a sum is held back until it is decided, and each character is looked at once."""

    def __init__(self):
        self._held, self._length = [], 0  # joined once, so that the work is linear
        self._place = "start"  # then "result", where blanks are dropped; then "answer"

    def feed(self, text, ids=()):
        if self._place == "start":
            return self._decide(text)
        if self._place == "result":
            text = text.lstrip()
        if not text:
            return []
        self._place = "answer"
        return [Text(text)]

    def _decide(self, text):
        found = OTHER.search(text)
        end = found.start() if found else len(text)
        self._held.append(text[:end])
        self._length += end
        if self._length > LONGEST:
            return self._no_sum(text[end:])
        if found is None:
            return []
        working = "".join(self._held)
        if found[0] != "=" or not any(map(str.isdigit, working)):
            return self._no_sum(text[end:])
        self._held, self._place = [], "result"
        return [Reasoning(f"{working}="), *self.feed(text[end + 1 :])]

    def _no_sum(self, rest):
        """No word is lost: what is no working is the answer."""
        said, self._held, self._place = "".join([*self._held, rest]), [], "answer"
        return [Text(said)] if said else []

    def flush(self):
        return self._no_sum("") if self._place == "start" else []
