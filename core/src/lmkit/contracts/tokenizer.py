"""What turns text into token ids and back. No torch."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from lmkit.contracts.errors import UnsupportedTask

if TYPE_CHECKING:
    from lmkit.contracts.text import ChatWriter

MARK = "\ufdd0"  # breaks what a client spells of a control token; a noncharacter, so no text needs it
_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """feed(token) -> the text that became certain; flush() -> the rest, as a full decode would show it."""

    def feed(self, token: int) -> str: ...
    def flush(self) -> str: ...


class BytesDetokenizer:
    """Token ids to text, incrementally. The deltas join to the full decode, and never hold half a character.

    `piece(token)` gives the bytes of a token; b"" for tokens that are not shown.
    """

    __slots__ = ("_decode", "_piece")

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decode = _utf8("replace").decode

    def feed(self, token: int) -> str:
        return self._decode(self._piece(token))

    def flush(self) -> str:
        return self._decode(b"", True)


class Tokenizer(ABC):
    """text <-> token ids. Thread-safe; one object per process. What is not abstract has a default that serves all."""

    vocab_size: int  # ids are in [0, vocab_size)
    eos_token_ids: tuple[int, ...]
    bos_token: str | None
    eos_token: str | None
    special_ids: frozenset[int]  # ids dropped from text unless a parser keeps them
    chat_template: str | None = None
    tools_template: str | None = None  # in place of chat_template, for requests with tools
    chat_writer: ChatWriter | None = None  # writes prompts where there is no template

    @abstractmethod
    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Control tokens that are spelled in the text become those tokens."""

    @abstractmethod
    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...

    @abstractmethod
    def piece(self, token: int) -> bytes:
        """The bytes of one token, special tokens as their text. The pieces of a text join to the text."""

    @abstractmethod
    def id_of(self, text: str) -> int | None:
        """The id of the token written `text`, if there is one."""

    def encode_marked(self, text: str, *, add_special: bool = True) -> list[int]:
        """`text` with MARKs in it, which belong to no token and part those that they stand in."""
        first, *rest = text.split(MARK)
        ids = self.encode(first, add_special=add_special)
        return ids + [token for part in rest for token in self.encode(part, add_special=False)]

    def encode_pair(self, first: str, second: str | None, limit: int | None = None) -> tuple[list[int], int]:
        """Ids of one or two texts with special tokens, and where the second begins; 0 when its types do not tell.

        `limit`: the longer text loses tokens at its end until all fit. Raises UnsupportedTask for two texts where
        nothing says how they are joined.
        """
        if second is not None:
            raise UnsupportedTask("score", ("what needs one text",))
        return self.encode(first)[:limit], 0

    @property
    def encode_inner(self) -> Callable[[str], list[int]] | None:
        """Encodes text from the middle of another, where the vocabulary allows that. Never raises."""
        return None

    def template_variables(self) -> Mapping[str, str]:
        """Special tokens by the names that chat templates have for them: "bos_token" -> "<s>"."""
        named = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        return {name: text for name, text in named.items() if text is not None}

    def markers(self, texts: Iterable[str]) -> set[str]:
        """Tokens that are not special and yet mean more than their text, as `<think>` may.

        `texts` are the model's templates and the markers of its formats.
        """
        return set()

    def detokenizer(
        self, *, skip_special: bool = True, keep: frozenset[str] = frozenset(), context: Sequence[int] = ()
    ) -> Detokenizer:
        """A fresh incremental decoder. `keep`: special tokens to show all the same.

        `context`: the tokens before, for text that goes on there: some decoders drop the blank at the start of a text.
        """
        shown = {self.id_of(text) for text in keep}
        hidden = {i for i in self.special_ids if i not in shown} if skip_special else set()
        return BytesDetokenizer(lambda token: b"" if token in hidden else self.piece(token))
