"""Seams of the text side: tokenizers and stream parsers. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from lmkit.contracts.params import Grammar


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
        ...


class Tokenizer(Protocol):
    """text <-> token ids. Thread-safe; one object per process."""

    vocab_size: int  # ids are in [0, vocab_size)
    eos_token_ids: tuple[int, ...]
    bos_token: str | None
    eos_token: str | None
    special_ids: frozenset[int]  # ids dropped from text unless a parser keeps them
    chat_template: str | None

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Control tokens that are spelled in the text become those tokens."""
        ...

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


@dataclass(frozen=True, slots=True)
class ParseWarning:
    """The output broke its format. `text`: what was written there and is shown nowhere else."""

    message: str
    text: str = ""


ParseEvent = Text | Reasoning | ToolStart | ToolArgs | ToolEnd | ParseWarning


class StreamParser(Protocol):
    """One instance per choice. join(feed(parts)) + flush() is the same for every split of the text."""

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[ParseEvent]: ...
    def flush(self) -> list[ParseEvent]:
        """Releases everything held back."""
        ...


# What a family writes is declared with the types below, and the core derives from one declaration the parser (whole and
# streamed are the same machine), the decoding grammar, and texts for tests. Blanks between the parts of a call are
# always accepted. A field that takes several texts lists what is accepted; the first is what is written.


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """{"name": ..., "arguments": {...}}, keys in any order."""

    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    id: tuple[str, ...] = ()  # keys whose value is the id of the call
    many: Literal["one", "list", "any"] = "one"  # an object; an array of objects; either
    keyed: bool = False  # {NAME: {...}} instead of named fields
    required: bool = False  # a call without arguments is none


@dataclass(frozen=True, slots=True)
class NamedJson:
    """The name, a separator, the arguments as a JSON object: get_time<sep>{"zone": "UTC"}."""

    ends: tuple[str, ...]  # what ends the name; "{" is not consumed
    prefix: tuple[str, ...] = ()  # constant texts before the name
    id_mark: str = ""  # comes between the name and its end, followed by the id of the call
    pattern: str = r"(?P<name>[^\s<>\[\]{}|]+)"  # of what stands for the name; groups "name" and perhaps "id"
    written: str = "{name}"  # how a name is written; may use {index}


@dataclass(frozen=True, slots=True)
class Params:
    """The name, then one element per argument: <parameter=city>Paris</parameter>, typed by the tool's JSON schema."""

    name_ends: tuple[str, ...]  # what ends the name; a text that is also `open` or `foot` is not consumed
    open: str  # before a key
    key_ends: tuple[str, ...]  # after a key
    close: str  # after a value
    foot: str = ""  # after the last value, when the format has one besides the close of the call
    prefix: tuple[str, ...] = ()  # constant texts before the name
    value_open: str = ""  # before a value, when a key is closed of its own
    typed: tuple[str, ...] = ()  # "string" or "json" for each of `key_ends`, when the element says its type
    untyped: Literal["string", "json"] = "string"  # how a value is read that the schema says nothing of
    strip: Literal["", "newline", "blank"] = ""  # taken off both ends of a value; "newline": one at each end
    verbatim: bool = False  # all values are strings
    gap: str = ""  # blanks that the family writes around elements
    block: bool = False  # a value with a newline at both ends stands on lines of its own: they are not part of it
    raw: tuple[str, ...] = ()  # what may stand before and after a part of a value in which markers are text
    wrappers: tuple[str, ...] = ()  # keys that hold all arguments as one object, when the tool has none of that name


@dataclass(frozen=True, slots=True)
class PyCalls:
    """Python calls with literal arguments: [f(a=1, b="x"), g()], or with `lines` one call per line."""

    lines: bool = False


@dataclass(frozen=True, slots=True)
class LooseObject:
    """The name and an object with bare keys: f{city:<q>Paris<q>,days:[1,2]}. What is not marked as a string is JSON."""

    quotes: tuple[str, ...]  # stand before and after a string
    prefix: tuple[str, ...] = ()  # constant texts before the name


CallBody = JsonCalls | NamedJson | Params | PyCalls | LooseObject


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family writes tool calls. The core runs all of them with one machine: a plugin ships data and no code.

    `open` and `close` stand around one body, `section` around all of them. A body of JsonCalls with a list, or of
    PyCalls, holds any number of calls. Of several bodies the JSON one is used where "{" or "[" follows. A bracket at
    the end of `open` belongs to the body; an empty first text says that the family writes no marker.
    """

    name: str
    body: CallBody | tuple[CallBody, ...]
    open: tuple[str, ...] = ()
    close: tuple[str, ...] = ()
    section: tuple[str, ...] = ()  # what begins a section; `section_close` ends it
    section_close: tuple[str, ...] = ()
    loose: bool = False  # a call may come without its section
    bare: Literal["", "start", "anywhere"] = ""  # where a body may come without `open`
    rearm: tuple[str, ...] = ()  # content after which a bare body may come again
    separators: str = ""  # characters that may stand between calls, besides blanks
    noise: Literal["content", "drop"] = "content"  # text in a section and outside of its calls; dropped with a warning
    drop: tuple[str, ...] = ()  # texts that the family writes around calls or content, and nobody wants to see
    opaque: tuple[str, ...] = ()  # two texts: content between them holds no calls
    trim: bool = False  # blanks between content and a call belong to the call
    inner: str = ""  # blanks that the family writes inside of `open` and `close`
    between: str = ""  # what it writes between calls; blanks also inside of the section
    begun: str = ""  # the beginning of `open` that the prompt ends with: the output goes on with the rest
    id_length: int = 0  # call ids are this many letters and digits; 0 = "call_" and 24 hex digits

    @property
    def keep_special(self) -> frozenset[str]:
        texts = [*self.open, *self.close, *self.section, *self.section_close, *self.drop, *self.rearm]
        for body in self.body if isinstance(self.body, tuple) else (self.body,):
            if isinstance(body, NamedJson):
                texts += [*body.ends, *body.prefix, body.id_mark]
            elif isinstance(body, Params):
                texts += [*body.name_ends, body.open, *body.key_ends, body.close, body.foot, *body.prefix]
                texts.append(body.value_open)
            elif isinstance(body, LooseObject):
                texts += [*body.quotes, *body.prefix]
        return frozenset(t for t in texts if t and t not in "{[")


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family writes its reasoning. Without a marker in the prompt or the output everything is content.

    A template may open the reasoning in the prompt, or open and close it at once when thinking is off: the end of the
    prompt says so. Where no prompt is known, `prompt_opens` and the template switch do.
    """

    name: str
    open: tuple[str, ...]
    close: tuple[str, ...]
    until: tuple[str, ...] = ()  # what begins a call: reasoning that is never closed ends before the calls at its end
    prompt_opens: bool = False  # the template opens the reasoning, unless thinking is switched off
    switch: tuple[str, ...] = ()  # template variables that turn thinking on or off
    off: tuple[object, ...] = (False,)  # their values that turn it off
    default_on: bool = True  # thinking when no switch is given
    anywhere: bool = False  # reasoning may begin again after content
    stray_close: bool = False  # a `close` at the start of the output, without reasoning, is not content
    drop: tuple[str, ...] = ()  # wrappers around the answer that nobody wants to see
    answer: tuple[str, ...] = ()  # what begins an answer and nothing else: it ends the reasoning although `close` is
    # missing, and is not consumed
    trim: str = "\r\n"  # characters next to `open` and `close` that belong to them

    @property
    def keep_special(self) -> frozenset[str]:
        return frozenset((*self.open, *self.close, *self.until, *self.answer, *self.drop))


@dataclass(frozen=True, slots=True)
class ChannelFormat:
    """Messages with a header that names a channel, perhaps a recipient: <start>role to=f<channel>c<message>body
    <end>. The prompt ends after the role of the first. It reads reasoning, content and calls: no other format runs
    beside it."""

    name: str
    start: str  # begins a message
    channel: str  # begins the name of its channel
    message: str  # begins its body
    ends: tuple[str, ...]  # what ends a message
    role: str  # of the model's own messages
    reasoning: tuple[str, ...]  # channels whose messages are reasoning; all others are content
    final: str  # the channel of answers
    call: str  # the channel of calls
    content_type: str = ""  # what the header of a call ends with
    content_types: tuple[str, ...] = ()  # all that it may end with
    to: str = "to="  # before the recipient
    namespace: str = ""  # of the recipients that are tools; not part of their names
    nobody: tuple[str, ...] = ()  # recipients that are not tools; messages to them are reasoning
    calls: bool = True  # messages to tools are calls; False: they are content, without their header
    special: tuple[str, ...] = ()  # further special tokens of headers

    @property
    def keep_special(self) -> frozenset[str]:
        return frozenset((self.start, self.channel, self.message, *self.ends, *self.special))


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
