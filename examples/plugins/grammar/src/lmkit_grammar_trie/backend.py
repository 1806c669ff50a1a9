"""Which of some texts is written: the state is what can still follow."""

import json

import numpy as np
from lmkit.api import GrammarError


class Trie:
    """Contract: lmkit.api.GrammarBackend. One object for all grammars of an engine, made with its vocabulary."""

    kinds = frozenset({"choice"})

    def __init__(self, vocabulary):
        self.size = vocabulary.size
        self.ids = {}  # the bytes of a token -> its ids
        for token, piece in enumerate(vocabulary.pieces):
            if piece and token not in vocabulary.special_ids:  # control tokens are no text
                self.ids.setdefault(piece, []).append(token)
        self.pieces = {token: piece for piece, ids in self.ids.items() for token in ids}
        self.longest = max(map(len, self.ids), default=0)

    def compile(self, grammar):
        """In a process of its own, under limits: all that can be refused is refused here."""
        try:
            texts = json.loads(grammar.source)
        except (ValueError, RecursionError) as e:
            raise GrammarError(f"the choices are no JSON: {e}") from None
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise GrammarError("needs a JSON list of texts, none of them empty")
        return json.dumps(sorted(set(texts))).encode()

    def load(self, compiled):
        """In the engine, with what `compile` returned."""
        return Choices(self, [text.encode() for text in json.loads(compiled)])


class Choices:
    """Contract: lmkit.api.CompiledGrammar. What is worked out once is kept for all texts that follow it."""

    def __init__(self, backend, texts):
        self.backend, self.texts = backend, texts
        self.known = {}  # what was written -> ids that may follow
        self.nbytes = 100 * sum(map(len, texts))

    def matcher(self):
        return Matcher(self)

    def rest(self, written):
        return [text[len(written) :] for text in self.texts if text.startswith(written)]

    def allowed(self, written):
        found = self.known.get(written)
        if found is None:
            backend = self.backend
            rests = self.rest(written)
            begins = {rest[:n] for rest in rests for n in range(1, min(len(rest), backend.longest) + 1)}
            found = self.known[written] = sorted(token for begin in begins for token in backend.ids.get(begin, ()))
        return found


class Matcher:
    """Contract: lmkit.api.Matcher. End tokens are not its business: whoever asks allows them where it is complete."""

    def __init__(self, choices):
        self._choices = choices
        self._written = [b""]  # after each token, to go back

    def accept(self, ids):
        for n, token in enumerate(ids):
            if token not in self._choices.allowed(self._written[-1]):
                return n  # the state has moved by exactly that many
            self._written.append(self._written[-1] + self._choices.backend.pieces[token])
        return len(ids)

    def rollback(self, n):
        del self._written[len(self._written) - n :]

    def fill(self, row):
        bits = np.zeros(32 * len(row), np.uint8)
        bits[self._choices.allowed(self._written[-1])] = 1
        row[:] = np.packbits(bits, bitorder="little").view("<i4")

    def forced(self):
        """Tokens that follow without a choice are computed in one step, and not one after another."""
        found, written = [], self._written[-1]
        while written not in self._choices.texts and len(allowed := self._choices.allowed(written)) == 1:
            found += allowed
            written += self._choices.backend.pieces[allowed[0]]
        return found

    @property
    def complete(self):
        return self._written[-1] in self._choices.texts

    @property
    def exhausted(self):
        return self._choices.rest(self._written[-1]) == [b""]
