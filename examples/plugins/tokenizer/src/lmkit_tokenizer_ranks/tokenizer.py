"""Reads ranks.json: {"pattern": ..., "pieces": [...], "added": {TEXT: ID}, "special": [ID]}, pieces in base64. A text
is cut by `pattern`, and in each part the neighbours are joined whose piece has the lowest id, until none has one."""

import json
from base64 import b64decode
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import regex
from lmkit.api import CheckpointError, Tokenizer

LONGEST = 2000  # bytes that are joined at once: the work grows with their square


class Ranks(Tokenizer):
    """Contract: lmkit.api.Tokenizer. Thread-safe: nothing changes once it is made. What the class does not say has a
    default there: detokenizing token by token, texts with marks, pairs."""

    def __init__(self, path, *, eos_token_ids):
        file = Path(path) / "ranks.json"
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            pieces = [b64decode(piece, validate=True) for piece in found["pieces"]]
            self._pattern = regex.compile(found["pattern"])
            self._added = {str(text): int(token) for text, token in found["added"].items()}
            self.special_ids = frozenset(map(int, found["special"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, regex.error) as e:
            raise CheckpointError(f"{file} holds no tokenizer: {type(e).__name__}: {e}", fix="copy it again") from e
        named = {token: text.encode() for text, token in self._added.items()}
        self.vocab_size = max(len(pieces), *(token + 1 for token in named), 0)
        self._pieces = [named.get(i) or (pieces[i] if i < len(pieces) else b"") for i in range(self.vocab_size)]
        self._rank = {piece: i for i, piece in enumerate(pieces) if piece and i not in named}
        if not self.special_ids <= named.keys() or not all(bytes([byte]) in self._rank for byte in range(256)):
            raise CheckpointError(f"{file} lacks single bytes, or the texts of special tokens", fix="copy it again")
        self.eos_token_ids = tuple(token for token in eos_token_ids if token < self.vocab_size)
        self.bos_token = None
        self.eos_token = self._pieces[self.eos_token_ids[0]].decode() if self.eos_token_ids else None
        texts = sorted(self._added, key=len, reverse=True)  # the longest that fits is meant
        self._controls = regex.compile("|".join(map(regex.escape, texts)) or "(?!)")
        self._part = lru_cache(10_000)(self._joined)  # most parts are words that come again

    def encode(self, text, *, add_special=True):
        ids, end = [], 0
        for control in self._controls.finditer(text):
            ids += self._plain(text[end : control.start()])
            ids.append(self._added[control[0]])
            end = control.end()
        return ids + self._plain(text[end:])

    def _plain(self, text):
        parts = (part.encode(errors="replace") for part in self._pattern.findall(text))
        cut = (part[i : i + LONGEST] for part in parts for i in range(0, len(part), LONGEST))
        return [token for part in cut for token in self._part(part)]

    def _joined(self, part):
        pieces = [part[i : i + 1] for i in range(len(part))]
        while len(pieces) > 1:
            ranks = [self._rank.get(a + b, self.vocab_size) for a, b in pairwise(pieces)]
            at = ranks.index(min(ranks))
            if ranks[at] == self.vocab_size:
                break
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        return tuple(map(self._rank.__getitem__, pieces))

    def decode(self, ids, *, skip_special=True):
        hidden = self.special_ids if skip_special else ()
        return b"".join(self.piece(token) for token in ids if token not in hidden).decode(errors="replace")

    def piece(self, token):
        return self._pieces[token] if 0 <= token < self.vocab_size else b""

    def id_of(self, text):
        return self._added.get(text, self._rank.get(text.encode()))

    def markers(self, texts):
        """Added tokens that are shown, and yet mean more than their text, as <think>."""
        return {text for text, token in self._added.items() if token not in self.special_ids}
