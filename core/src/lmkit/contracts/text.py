"""Seams of the text side: writers of prompts and stream parsers. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from lmkit.contracts.params import Grammar, Thinking


class ChatWriter(Protocol):
    """Writes prompts where a checkpoint has no template: the attribute `chat_writer` of its tokenizer. Thread-safe."""

    takes_tools: bool
    options: frozenset[str]  # what a request may set (chat_template_kwargs)

    def write(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any],
        *, add_generation_prompt: bool,
    ) -> str:  # fmt: skip
        """The prompt, control tokens as their text. `messages` as in the OpenAI API, arguments of calls as objects;
        without `add_generation_prompt` a last message of the assistant is not ended. May raise anything: what it
        does not take is the request's fault.
        """


@dataclass(frozen=True, slots=True)
class ToolDef:
    """One tool of a request: `parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the answer may, must or must not call tools, and which."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    """A call begins."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArgs:
    """A piece of a call's arguments, as JSON text."""

    index: int
    json_fragment: str


@dataclass(frozen=True, slots=True)
class ToolEnd:
    """A call is complete: the model closed it, and its arguments are a JSON object."""

    index: int


@dataclass(frozen=True, slots=True)
class ToolCut:
    """A call ends that the model did not close, so nobody may execute it. Its arguments stay as far as they came, and
    do not parse. `text`: what the model wrote of the call, for clients that get no such arguments."""

    index: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class ParseWarning:
    """The output broke its format. `text`: what was written there and is shown nowhere else. `in_call`: the output
    ended inside a tool call."""

    message: str
    text: str = ""
    in_call: bool = False


ParseEvent = Text | Reasoning | ToolStart | ToolArgs | ToolEnd | ToolCut | ParseWarning


class StreamParser(Protocol):
    """One instance per choice. join(feed(parts)) + flush() is the same for every split of the text."""

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[ParseEvent]: ...
    def flush(self) -> list[ParseEvent]:
        """Releases everything held back."""


class ParserFormat(Protocol):
    """What a parser plugin registers that reads a format with code of its own. What it returns is checked."""

    name: str
    keep_special: frozenset[str]  # special tokens the detokenizer must not drop

    def start(self, prompt_tail: str, tools: Sequence[ToolDef]) -> StreamParser:
        """`prompt_tail`: the end of the rendered prompt, which says whether it ended inside reasoning."""

    def grammar(self, tools: Sequence[ToolDef], choice: ToolChoice) -> Grammar | None:
        """The constraint for required or named tools; None = cannot be constrained."""


class DeclaredFormat(ABC):
    """What a parser plugin registers that is pure data, over the machine of a library (lmkit_formats).

    The machine is trusted, so such a format is also tried on templates before anything is chosen. A structural tag is
    what `Grammar` says, without its outermost object.
    """

    __slots__ = ()

    name: str

    @property
    @abstractmethod
    def keep_special(self) -> frozenset[str]:
        """The special tokens that the detokenizer must not drop."""

    @property
    def within_turn(self) -> frozenset[str]:
        """Those of them that stand within a turn of the model, and so never end it."""
        return self.keep_special

    @property
    def whole(self) -> bool:
        """Whether the format reads reasoning, content and calls at once, so that no other runs beside it."""
        return False

    @abstractmethod
    def build(
        self, prompt_tail: str | None, tools: Sequence[ToolDef], template_kwargs: Mapping[str, object], *,
        constrained: bool,
    ) -> StreamParser:  # fmt: skip
        """A parser for one choice. `prompt_tail`: the end of the rendered prompt; None when no prompt is known.

        `constrained`: a grammar sees to it that the answer is calls, or one text in which markers are text.
        """

    def tag(self, tools: Sequence[ToolDef], *, free: bool, parallel: bool) -> dict[str, Any] | None:
        """The structural tag of one call or more and nothing else, or with `free` of text with calls in it. None where
        the format cannot be constrained; raises InvalidParam for a strict tool whose schema cannot be enforced.
        """
        return None

    def thinking(self, prompt_tail: str, template_kwargs: Mapping[str, object], budget: int | None) -> Thinking | None:
        """The thinking that may come before the answer; None where there is none."""
        return None

    @property
    def answer_header(self) -> str:
        """What is written before the content of an answer."""
        return ""

    def reopened(self, continued: str) -> str:
        """What opens the reasoning that a message to be continued ends in; "" when it does not end in reasoning."""
        return ""

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]], tools: Sequence[ToolDef] = ()) -> str:
        """The calls (name, arguments) as a model of this family writes them; "" for none."""
        return ""

    @property
    def openers(self) -> tuple[str, ...]:
        """The markers that calls begin with."""
        return ()

    @property
    def thought(self) -> tuple[str, str]:
        """What is written before and after reasoning that an answer follows."""
        return "", ""
