"""Seams of the text side: tokenizers and stream parsers. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from lmkit.api.params import Grammar


class Tokenizer(Protocol):
    """text <-> token ids. Thread-safe; one object per process."""

    vocab_size: int  # ids are in [0, vocab_size)
    eos_token_ids: tuple[int, ...]
    bos_token: str | None
    eos_token: str | None
    special_ids: frozenset[int]  # ids dropped from text unless a parser keeps them
    chat_template: str | None

    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...
    def piece(self, token: int) -> bytes:
        """The bytes of one token, special tokens as their text. The pieces of a text join to the text."""
        ...

    def id_of(self, text: str) -> int | None:
        """The id of the token written `text`, if there is one."""
        ...


@dataclass(frozen=True, slots=True)
class ToolDef:
    """One tool of a request: `parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArgs:
    index: int
    json_fragment: str


@dataclass(frozen=True, slots=True)
class ToolEnd:
    index: int


ParseEvent = Text | Reasoning | ToolStart | ToolArgs | ToolEnd


class StreamParser(Protocol):
    """One instance per choice. join(feed(parts)) + flush() is the same for every split of the text."""

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[ParseEvent]: ...
    def flush(self) -> list[ParseEvent]:
        """Releases everything held back."""
        ...


@dataclass(frozen=True, slots=True)
class TagFormat:
    """A format that is a table: what stands between `open` and `close` is the body. The core runs all of them with
    one generic machine, so a plugin ships data and no code.

    body "reasoning": at most one body, at the start of the output; the prompt may have opened it already.
    body "json_calls": any number of calls, each one JSON object {"name": ..., "arguments": {...}}.
    """

    name: str
    open: str
    close: str
    body: Literal["reasoning", "json_calls"]
    until: tuple[str, ...] = ()  # texts that end a reasoning body although `close` is missing; they are not consumed

    @property
    def keep_special(self) -> frozenset[str]:
        return frozenset((self.open, self.close))


class ParserFormat(Protocol):
    """What a parser plugin registers: usually pure data over a generic machine."""

    name: str
    keep_special: frozenset[str]  # special tokens the detokenizer must not drop

    def start(self, prompt_tail: str, tools: Sequence[ToolDef]) -> StreamParser:
        """`prompt_tail`: the end of the rendered prompt, which says whether it ended inside reasoning."""
        ...

    def grammar(self, tools: Sequence[ToolDef], choice: ToolChoice) -> Grammar | None:
        """The constraint for required or named tools; None = cannot be constrained."""
        ...
