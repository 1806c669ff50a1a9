"""JSON bodies read strictly: bounded, and an error names the first wrong field. For dialects of any kind.

One rule decides about every field of a request and of its parts (`settle`):

- a declared field is honoured;
- a field in `refused`, whose absence would change what the answer means, is refused by name, with what to send instead;
- a field in `droppable`, which changes nothing here (labels, telemetry, storage, speed), is dropped and named;
- an unknown field is dropped and named as well, or refused when the server is told to (`--unknown-fields refuse`).

Values that say nothing (null, false, "", [], {}) are accepted everywhere. Inside messages and tools, which clients send
back and decorate, lmkit_http.messages decides: the chat template may read names that nobody else knows.
"""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from lmkit.api import MAX_TOKENS, InvalidParam, RequestError
from lmkit_python.front.ask import UnsupportedField
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from lmkit_http.shape import check_shape

MAX_MESSAGES = 8192
MAX_TOOLS = 512
MAX_LABEL = 512
MAX_TEXT = 32 << 20  # characters; the body limit is usually lower
MAX_VALUES = 1 << 17  # of all lists and objects of a body together
MAX_IDS = 5 << 18  # the same, where token ids may be given
_SHOWN = 1 << 18  # bytes of a body, the wrong values of which are shown
_MAX_ERRORS = 64  # wrong fields that are looked at, to name the first
_ALIKE = 0.75  # how much a name is like one that it was meant to be (difflib)
_NUMBER = re.compile(r"-?\d{1,19}(\.\d{1,19})?(e-?\d{1,3})?")
MAX_WARNING = 1024  # bytes of the header that names the dropped fields
MAX_NAMED = 64  # dropped fields that are remembered and counted by name
_NAME = re.compile(r"[\w.\[\]-]{1,80}", re.ASCII)
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})

Name = Annotated[str, Field(min_length=1, max_length=256)]
Label = Annotated[str, Field(max_length=MAX_LABEL)]
Content = Annotated[str, Field(max_length=MAX_TEXT)]
TokenId = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]
Ids = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_TOKENS)]
# a number of output tokens; -1, and what is more than any model has, stand for as many as fit
OutputTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS), BeforeValidator(lambda value: as_output_tokens(value))]
Json = Annotated[dict[str, JsonValue], Field(max_length=1024)]


@dataclass(frozen=True)
class Refused:
    """A known field that cannot be honoured and whose absence would change what the answer means."""

    fix: str  # what to send instead
    unless: tuple[Any, ...] = ()  # values that describe what happens anyway
    unless_empty: bool = True  # null, false, "", [] and {} change nothing either

    def applies_to(self, value: object) -> bool:
        """True when the value has to be refused."""
        return not (value is None or value in self.unless or (self.unless_empty and says_nothing(value)))


class Strict(BaseModel):
    """A request, or a part of one. `settle` decides about the fields that it does not declare."""

    max_values: ClassVar[int] = MAX_VALUES
    # unknown fields are kept until `settle` has decided about them; aliases are names that pydantic has
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    refused: ClassVar[Mapping[str, Refused]] = {}
    droppable: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # name -> values that the answer does not even mention

    @classmethod
    def states(cls) -> dict[str, str]:
        """The known fields: "works", "dropped" or "refused". The fields of a part are called "part.field"."""
        parts = cls.parts()
        works = dict.fromkeys((f.alias or name for name, f in cls.model_fields.items() if name not in parts), "works")
        within = {f"{part}.{name}": state for part, kind in parts.items() for name, state in kind.states().items()}
        return works | within | dict.fromkeys(cls.droppable, "dropped") | dict.fromkeys(cls.refused, "refused")

    @classmethod
    def refusals(cls) -> dict[str, Refused]:
        """The table `refused`, with the tables of the parts."""
        parts = cls.parts().items()
        within = {f"{part}.{name}": refusal for part, kind in parts for name, refusal in kind.refusals().items()}
        return {**cls.refused, **within}

    @classmethod
    def parts(cls) -> dict[str, type[Strict]]:
        """The fields that are requests of their own, or parts with a table."""
        kinds = {name: get_args(field.annotation) or (field.annotation,) for name, field in cls.model_fields.items()}
        return {name: kind for name, members in kinds.items() for kind in members
                if isinstance(kind, type) and issubclass(kind, Strict) and not issubclass(kind, Echoed)
                and name not in cls.refused and (issubclass(kind, Open) or kind.refused or kind.droppable)}  # fmt: skip


def as_number(value: Any) -> Any:
    """10.0 is 10, and a text that spells a number is meant as one; bools are no numbers."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value) if set(value) & set(".e") else int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


NUMBER = BeforeValidator(as_number)  # of a field, as the last of what is said of it


def as_output_tokens(value: Any) -> Any:
    """A number of output tokens, at most MAX_TOKENS; -1 stands for as many as fit."""
    number = as_number(value)
    if isinstance(number, int) and not isinstance(number, bool) and (number == -1 or number > MAX_TOKENS):
        return MAX_TOKENS
    return number


class Open(Strict):
    """A request of a dialect: its unknown fields are dropped and named, unless the server refuses them."""

    _dropped: set[str] = PrivateAttr(default_factory=set)

    @property
    def dropped(self) -> set[str]:
        """The names of the fields that were accepted and change nothing."""
        return self._dropped


def says_nothing(value: object) -> bool:
    return any(value is n or (type(value) is type(n) and value == n) for n in _NOTHING)


def settle(request: Strict, lenient: bool) -> set[str]:
    """Applies the rule of this module to the fields of a request and of its parts. Returns the names of the dropped
    fields. `lenient`: unknown fields are dropped, too. Raises UnsupportedField."""
    dropped: set[str] = set()
    _settle(request, lenient, (), dropped)
    return dropped


def _settle(part: Strict, lenient: bool, path: tuple[str, ...], dropped: set[str]) -> None:
    """`path`: the names of the fields and the numbers of the list entries that lead to this part."""
    kind, unknown = type(part), part.model_extra or {}
    if not isinstance(part, Echoed):
        where = "".join(f"{name}." for name in path if not name.isdigit())
        for name in sorted(part.model_fields_set):
            value = unknown[name] if name in unknown else getattr(part, name)
            if (refusal := kind.refused.get(name)) is not None:
                if refusal.applies_to(value):
                    raise _unsupported(kind, (*path, name))
            elif name in kind.droppable:
                if not says_nothing(value) and value not in kind.droppable[name]:
                    dropped.add(where + name)
            elif name in unknown and not says_nothing(value):
                if not lenient:
                    raise _unsupported(kind, (*path, name))
                dropped.add(where + name)
        unknown.clear()
    for name in _parts_of(kind):
        for number, member in _members(getattr(part, name)):
            _settle(member, lenient, (*path, name, *number), dropped)


def _members(value: object) -> Iterator[tuple[tuple[str, ...], Strict]]:
    """The parts in the value of a field, with their numbers in its list."""
    if isinstance(value, Strict):
        yield (), value
    elif isinstance(value, list):
        for i, member in enumerate(value):
            if isinstance(member, Strict):
                yield (str(i),), member


@cache
def _parts_of(kind: type[Strict]) -> tuple[str, ...]:
    """The fields in which parts may stand that are not simply echoed."""
    return tuple(name for name, field in kind.model_fields.items() if _holds_parts(field.annotation, {kind}))


def _holds_parts(annotation: Any, visited: set[type[Strict]]) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        if not issubclass(annotation, Echoed):
            return True
        if annotation in visited:
            return False
        visited.add(annotation)
        return any(_holds_parts(field.annotation, visited) for field in annotation.model_fields.values())
    return any(_holds_parts(argument, visited) for argument in get_args(annotation))


def shown_names(dropped: Iterable[str]) -> list[str]:
    """The names of dropped fields, sorted and at most MAX_NAMED, as they may be shown: names can be a client's."""
    return sorted({name if _NAME.fullmatch(name) else "?" for name in dropped})[:MAX_NAMED]


def warnings_header(dropped: Iterable[str]) -> dict[str, str]:
    """The header that names the dropped fields, at most MAX_WARNING bytes of it; none when nothing was dropped."""
    names = shown_names(dropped)
    text = f"dropped: {', '.join(names)}"
    while len(text) > MAX_WARNING:
        names.pop()
        text = f"dropped: {', '.join(names)}, ..."
    return {"x-lmkit-warnings": text} if names else {}


class Echoed(Strict):
    """A part that clients send back from answers and decorate: names that are not declared are allowed."""


class Part(Echoed):
    type: Annotated[str, Field(max_length=64)]
    text: Content | None = None
    refusal: Content | None = None
    thinking: Content | None = None


def as_arguments(value: Any) -> Any:
    """Arguments of a call as a text, which some clients keep as the object that it spells, or leave out."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False)


Arguments = Annotated[Content, BeforeValidator(as_arguments)]


class FunctionCall(Echoed):
    name: Name
    arguments: Arguments = ""


class ToolCall(Echoed):
    id: Label | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Annotated[int, Field(ge=0, le=4096)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_function(cls, value: Any) -> Any:
        """A call of a custom tool, which has one text, is read as a call of a function with the argument `input`."""
        if not isinstance(value, dict):
            return value
        call = {name: member for name, member in value.items() if name != "type" or member is not None}
        if call.get("type") == "custom" and isinstance(custom := call.get("custom"), dict):
            del call["custom"]
            arguments = {"input": custom.get("input") or ""}
            call |= {"type": "function", "function": {"name": custom.get("name"), "arguments": arguments}}
        return call


class Message(Echoed):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Content | Annotated[list[Part | Content], Field(fail_fast=True, max_length=4096)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=1024)] | None = None
    tool_call_id: Label | None = None
    reasoning_content: Content | None = None
    reasoning: Content | None = None
    refusal: Content | None = None
    # what official clients send back from an answer; nothing to honour in it
    annotations: Annotated[list[JsonValue], Field(fail_fast=True, max_length=1024)] | None = None


class Function(Echoed):
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: Content | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Echoed):
    type: Annotated[str, Field(min_length=1, max_length=64)]
    function: Function | None = None  # every tool of type "function" has one


_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
Model = TypeVar("Model", bound=Strict)


def parse(kind: type[Model], body: bytes | bytearray, most: int = MAX_IDS, lenient: bool = True) -> Model:
    """A request from its JSON body. `most`: values in lists and objects that the body may have. `lenient`: unknown
    fields of a request that is Open are dropped. Raises RequestError that names the first wrong field."""
    check_shape(body, min(most, kind.max_values))
    body = body.removeprefix(BOM_UTF8)  # RFC 8259, 8.1: parsers may ignore it
    try:
        request = kind.model_validate_json(body)
    except ValidationError as e:
        raise _explain(e, body) from None
    dropped = settle(request, lenient and isinstance(request, Open))
    if isinstance(request, Open):
        request.dropped.update(dropped)
    return request


def _explain(error: ValidationError, body: bytes | bytearray) -> RequestError:
    if error.error_count() > _MAX_ERRORS:  # a description of each would take longer than reading the body
        return InvalidBody(f"{error.error_count()} fields of the body are wrong")
    problems = error.errors(include_url=False, include_context=True, include_input=len(body) <= _SHOWN)
    problem = _most_specific(problems)
    field = _field([str(p) for p in problem["loc"] if not _is_branch(str(p))])
    if problem["type"] == "json_invalid":
        return InvalidBody(f"the body is not valid JSON: {problem['msg'].split(': ', 1)[-1]}"[:300])
    if problem["type"] == "missing":
        return InvalidBody(f"{field} is required", field)
    return InvalidParam(field, _short(problem.get("input", "...")), _needs(problem))


def _unsupported(kind: type[Strict], path: Sequence[str]) -> RequestError:
    """The error about a field that is refused, or that nobody knows."""
    name, field = path[-1], _field(path)
    if (refusal := kind.refused.get(name)) is not None:
        return UnsupportedField(field, f"{field!r} is not supported here", fix=refusal.fix)
    like = get_close_matches(name[:100], [f.alias or n for n, f in kind.model_fields.items()], 1, _ALIKE)
    fix = f"did you mean {like[0]!r}?" if like else "leave it out"
    return UnsupportedField(field, f"unknown field {field!r}", fix=fix)


def _field(path: Sequence[str]) -> str:
    """Names in a path may be a client's, and as long as the body."""
    return ".".join(path)[:200] or "body"


def _short(value: Any, num: int = 20, levels: int = 3) -> Any:
    """The beginning of a value: enough to recognize it by."""
    if isinstance(value, str):
        return value[:200]
    if isinstance(value, dict):
        return {k[:200]: _short(v, 4, levels - 1) for k, v in islice(value.items(), num * (levels > 0))}
    if isinstance(value, list):
        return [_short(v, 4, levels - 1) for v in value[: num * (levels > 0)]]
    return value


class InvalidBody(RequestError):
    def __init__(self, message: str, field: str | None = None) -> None:
        self.field = field
        super().__init__(message)


def _most_specific(problems: list[Any]) -> Any:
    """Finds among the branches of a union the one that got furthest, and whose type was right."""
    return max(problems, key=lambda p: (not p["type"].endswith("_type"), len(p["loc"])))


def _is_branch(name: str) -> bool:
    """Names that pydantic adds to the path for the branches of a union."""
    return name in ("str", "Part", "NamedTool") or "[" in name or "constrained" in name


def _needs(problem: Any) -> str:
    limits = problem.get("ctx", {})
    for name, words in (("min_length", "at least"), ("max_length", "at most")):
        if name in limits:
            unit = "character" if problem["type"].startswith("string") else "entry"
            many = {"character": "characters", "entry": "entries"}[unit]
            return f"{words} {limits[name]} {unit if limits[name] == 1 else many}"
    text: str = problem["msg"]
    for start in ("Input should be a valid ", "Input should be ", "Value error, "):
        text = text.removeprefix(start)
    return text[:200]


def check_calls(messages: Sequence[Message]) -> None:
    """Raises RequestError."""
    for i, message in enumerate(messages):
        for j, call in enumerate(message.tool_calls or ()):
            check_arguments(call.function.arguments, f"messages.{i}.tool_calls.{j}.function.arguments")


def check_arguments(text: str, field: str) -> None:
    """A template gets the value that the text stands for, so it is bounded like the body around it.

    A text that is not JSON is shown as it is. Raises RequestError.
    """
    check_shape(text.encode(), MAX_VALUES, field)
    if _HALF_PAIR.search(text):
        try:
            json.dumps(json.loads(text), ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise InvalidParam(field, text[:200], "text without halves of surrogate pairs") from None
        except ValueError:
            pass
