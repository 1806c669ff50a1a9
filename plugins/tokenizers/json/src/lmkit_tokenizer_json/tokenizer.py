"""Tokenizers from tokenizer.json, without transformers. One object per process, safe to use from several threads.

A checkpoint's is not run in this process but kept apart, see apart.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
from lmkit.api import MARK, BytesDetokenizer, CheckpointError, Detokenizer, Tokenizer
from lmkit.files import chat_templates, content_of, read_own, tokenizer_settings
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import BPE

from lmkit_tokenizer_json.added import add_tokens
from lmkit_tokenizer_json.cleanup import CleaningDetokenizer, clean_up
from lmkit_tokenizer_json.lowercase import lower
from lmkit_tokenizer_json.window import WindowDetokenizer

_LONG = 1024  # characters
_CONTEXT = 8  # tokens
_SPARSE, _MAX_GAP = 4, 1 << 16  # ids may leave gaps: up to so many times the number of tokens, and so many more
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 stands for itself, the other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


class JsonTokenizer(Tokenizer):
    """Over the `tokenizers` library."""

    def __init__(
        self,
        raw: RawTokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
        tools_template: str | None = None,
        add_bos: bool | None = None,
        clean_up: bool = False,
        warnings: Sequence[str] = (),
    ) -> None:
        """`clean_up`: blanks before punctuation are removed from decoded text."""
        raw.no_truncation()
        raw.no_padding()
        self._raw, self._clean_up = raw, clean_up
        self.warnings = tuple(warnings)  # about the files that were read
        self.bos_token, self.eos_token = bos_token, eos_token
        self.special_tokens = dict(special_tokens or {})  # "pad_token" -> "<pad>": variables of chat templates
        self.chat_template, self.tools_template = chat_template, tools_template
        self._added = raw.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.vocab_size = max(raw.get_vocab_size(with_added_tokens=True), 1 + max(self._added, default=-1))
        own_eos = raw.token_to_id(eos_token) if eos_token else None
        self.eos_token_ids = tuple(eos_token_ids) or (() if own_eos is None else (own_eos,))
        self._prefix: list[int] = []
        bos = raw.token_to_id(bos_token) if bos_token else None
        if add_bos and bos is not None and raw.encode("x").ids[:1] != [bos]:
            self._prefix = [bos]
        self._byte_level = _decoder(raw).get("type") == "ByteLevel"
        self._alphabet = _byte_of_char()
        self._pieces: dict[int, bytes] = {}  # bounded by the vocabulary

    def table(self) -> dict[str, Any]:
        """All but what encodes, as plain data: arguments of `__init__`, and the vocabulary in place of `raw`."""
        ids = self._raw.get_vocab(with_added_tokens=True).values()
        return {
            "tokens": [self._raw.id_to_token(i) for i in range(1 + max(chain(ids, self._added), default=-1))],
            "added": [
                (i, token.content, token.special, self._raw.model.id_to_token(i) is not None)
                for i, token in self._added.items()
            ],
            "decoder": _decoder(self._raw) or None,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "special_tokens": self.special_tokens,
            "eos_token_ids": self.eos_token_ids,
            "chat_template": self.chat_template,
            "tools_template": self.tools_template,
            "clean_up": self._clean_up,
            "warnings": self.warnings,
        }

    def markers(self, texts: Iterable[str]) -> set[str]:
        """Added tokens, as `<think>`.

        They begin and end with a sign, and are no part of the vocabulary that the model was first trained with, or
        stand in one of `texts`, which are the model's templates and formats. Others are words, blanks and the like.
        """
        found = set()
        for token, added in self._added.items():
            text = added.content
            if not added.special and len(text) > 2 and _is_sign(text[0]) and _is_sign(text[-1]):
                of_its_own = self._raw.model.id_to_token(token) is None and any(map(str.isalpha, text))
                if of_its_own or any(text in other for other in texts):
                    found.add(text)
        return found

    @property
    def fold(self) -> Callable[[str], str] | None:
        """What is done to a text before those added tokens are looked for that want it so; None: nothing is."""
        normalizer = self._raw.normalizer
        if normalizer is None or not any(added.normalized for added in self._added.values()):
            return None
        return normalizer.normalize_str

    def template_variables(self) -> Mapping[str, str]:
        return self.special_tokens or super().template_variables()

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        if len(text) > _LONG:  # the batch call lets other threads run, and does not compute offsets
            ids = self._raw.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
        else:
            ids = self._raw.encode(text, add_special_tokens=add_special).ids
        return self._prefix + ids if add_special and self._prefix else ids

    def encode_marked(self, text: str, *, add_special: bool = True) -> list[int]:
        if MARK not in text:
            return self.encode(text, add_special=add_special)
        if self._byte_level:
            return self._encode_parts(text.split(MARK), add_special)
        # Other vocabularies write a blank where a text begins, so the MARK is tokenized too, as its bytes.
        marks = [self.id_of(f"<0x{byte:02X}>") for byte in MARK.encode()]
        ids, kept, at = self.encode(text, add_special=add_special), [], 0
        while at < len(ids):
            if ids[at : at + len(marks)] == marks:
                at += len(marks)
            else:
                kept.append(ids[at])
                at += 1
        if (len(ids) - len(kept)) != len(marks) * text.count(MARK):
            return self._encode_parts(text.split(MARK), add_special)  # it has no bytes: then with some blanks more
        return kept

    def _encode_parts(self, parts: Sequence[str], add_special: bool) -> list[int]:
        first, *rest = parts
        ids = self.encode(first, add_special=add_special)
        return ids + [token for part in rest for token in self.encode(part, add_special=False)]

    @property
    def encode_inner(self) -> Callable[[str], list[int]] | None:
        return (lambda text: self.encode(text, add_special=False)) if self._byte_level else None

    def encode_pair(self, first: str, second: str | None, limit: int | None = None) -> tuple[list[int], int]:
        raw = self._raw
        a = raw.encode(first, add_special_tokens=False)
        b = None if second is None else raw.encode(second, add_special_tokens=False)
        if limit is not None:
            room = max(0, limit - len(self._prefix) - raw.num_special_tokens_to_add(b is not None))
            other = len(b.ids) if b is not None else 0
            keep_a = min(len(a.ids), max(room - other, room // 2))
            a.truncate(keep_a)
            if b is not None:
                b.truncate(min(other, room - keep_a))
        both = raw.post_process(a, b, True)
        ids = self._prefix + both.ids
        types = both.type_ids
        return ids, len(self._prefix) + types.index(1) if b is not None and 1 in types else 0

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        text = self._raw.decode(list(ids), skip_special_tokens=skip_special)
        return clean_up(text) if self._clean_up else text

    def id_of(self, text: str) -> int | None:
        return self._raw.token_to_id(text)

    def token(self, token: int) -> str:
        """The token as the vocabulary writes it; "" for an id without a token."""
        return self._raw.id_to_token(token) or ""

    def piece(self, token: int) -> bytes:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._make_piece(token)
        return piece

    def _make_piece(self, token: int) -> bytes:
        text = self._raw.id_to_token(token)
        if text is None:
            return b""
        if self._byte_level:
            codes = [self._alphabet.get(c) for c in text]
            return text.encode() if None in codes else bytes(c for c in codes if c is not None)
        if token in self._added:
            return text.encode()
        found = _BYTE_TOKEN.fullmatch(text)
        return bytes([int(found[1], 16)]) if found else text.replace("\u2581", " ").encode()

    def detokenizer(
        self, *, skip_special: bool = True, keep: frozenset[str] = frozenset(), context: Sequence[int] = ()
    ) -> Detokenizer:
        hidden = self.special_ids if skip_special else frozenset()
        if keep and hidden:
            hidden = frozenset(i for i in hidden if self._added[i].content not in keep)
        made = self._detokenizer(hidden, context)
        return CleaningDetokenizer(made) if self._clean_up else made

    def _detokenizer(self, hidden: frozenset[int], context: Sequence[int]) -> Detokenizer:
        if self._byte_level:
            return BytesDetokenizer(lambda token: b"" if token in hidden else self.piece(token))
        return WindowDetokenizer(
            lambda ids: self._raw.decode(list(ids), skip_special_tokens=False),
            hidden.__contains__,
            lambda token: token not in self._added and _BYTE_TOKEN.fullmatch(self.token(token)) is not None,
            context[-_CONTEXT:],
        )


def _decoder(raw: RawTokenizer) -> dict[str, Any]:
    """As tokenizer.json writes it; {} when there is none."""
    decoder = raw.decoder
    return {} if decoder is None else json.loads(decoder.__getstate__())


def _is_sign(char: str) -> bool:
    return not (char.isalnum() or char.isspace() or char == "\u2581")


def read_tokenizer(path: Path, *, eos_token_ids: Sequence[int] = (), chat_template: str | None = None) -> JsonTokenizer:
    """Reads tokenizer.json and, where present, tokenizer_config.json, special_tokens_map.json, added_tokens.json and
    chat_template.jinja. Tokens, their ids and decoded text are those of transformers' AutoTokenizer.

    `eos_token_ids` and `chat_template` come before what the files say. Raises CheckpointError.
    """
    file = path / "tokenizer.json"
    data = read_own(file)
    _check_ids(file, data)
    try:
        raw = RawTokenizer.from_buffer(data)
    except Exception as e:  # the library raises bare Exception
        raise CheckpointError(f"{file} is not a tokenizer: {e}", fix="download or convert it again") from e
    names, warnings = add_tokens(raw, path)
    settings = tokenizer_settings(path)
    raw.encode_special_tokens = bool(settings.get("split_special_tokens"))
    lower(raw, path)
    templates = chat_templates(path)
    special = {k: content_of(v) for k, v in settings.items() if k.endswith("_token") and content_of(v)} | names
    return JsonTokenizer(
        raw,
        bos_token=special.get("bos_token"),
        eos_token=special.get("eos_token"),
        special_tokens=special,
        eos_token_ids=eos_token_ids,
        chat_template=chat_template or templates.get("default"),
        tools_template=None if chat_template else templates.get("tool_use"),
        add_bos=settings.get("add_bos_token"),
        clean_up=_cleans_up(raw, settings),
        warnings=warnings,
    )


def _cleans_up(raw: RawTokenizer, settings: Mapping[str, Any]) -> bool:
    """True where decoded text is cleaned up, as in transformers: of BPE only where a second field insists."""
    insists = settings.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output")
    return bool(settings.get("clean_up_tokenization_spaces") and (insists or not isinstance(raw.model, BPE)))


class _Entry(msgspec.Struct):
    id: int = 0


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}


class _File(msgspec.Struct):
    """What of tokenizer.json has ids."""

    model: _Model
    added_tokens: list[_Entry] = []


def _check_ids(file: Path, data: bytes) -> None:
    """The library takes memory for the largest id, not for the number of tokens. Raises CheckpointError."""
    try:
        found = msgspec.json.decode(data, type=_File)
    except msgspec.DecodeError:
        return  # the library says what is wrong
    vocab = found.model.vocab
    ids = chain(vocab.values() if isinstance(vocab, dict) else (), (entry.id for entry in found.added_tokens))
    largest, limit = max(ids, default=0), _SPARSE * (len(vocab) + len(found.added_tokens)) + _MAX_GAP
    if largest > limit:
        raise CheckpointError(
            f"{file} gives a token the id {largest}; {len(vocab)} tokens have ids up to {limit}",
            fix="download it again",
        )
