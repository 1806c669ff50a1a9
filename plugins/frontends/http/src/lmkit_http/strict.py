"""JSON bodies read strictly: bounded, and an error names the first wrong field. For dialects of any kind.

What a field says is honoured or refused; what says nothing (null, false, "", [], {}) is accepted wherever it stands.
Inside messages and tools, which clients send back and decorate, names that nobody knows are taken too: what becomes of
them is the business of lmkit_http.messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

import msgspec
from lmkit.api import MAX_TOKENS, InvalidParam, RequestError
from lmkit_python.front.ask import UnsupportedField
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, PrivateAttr, ValidationError

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
_WARNED = 16  # names that an answer says were dropped
_NAME = re.compile(r"[\w.\[\]-]{1,80}", re.ASCII)
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})

Name = Annotated[str, Field(min_length=1, max_length=256)]
Label = Annotated[str, Field(max_length=MAX_LABEL)]
Content = Annotated[str, Field(max_length=MAX_TEXT)]
TokenId = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]
Ids = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_TOKENS)]
Json = Annotated[dict[str, JsonValue], Field(max_length=1024)]


class Strict(BaseModel):
    max_values: ClassVar[int] = MAX_VALUES
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)  # aliases are names that pydantic has


def as_number(value: Any) -> Any:
    """10.0 is 10, and a text that spells a number is meant as one; bools are no numbers."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value) if set(value) & set(".e") else int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


NUMBER = BeforeValidator(as_number)  # of a field, as the last of what is said of it


@dataclass(frozen=True)
class Hint:
    """A field that other servers know and this one does not honour: what to send instead, and the values beside
    null, false, "", [], {} that change nothing."""

    fix: str
    nothing: tuple[Any, ...] = ()


class Open(Strict):
    """A request. Fields that it does not declare are refused when they say something, with what `hints` knows."""

    model_config = ConfigDict(extra="allow")
    hints: ClassVar[Mapping[str, Hint]] = {}
    labels: ClassVar[Collection[str]] = ()  # fields that change nothing: they are dropped, and named
    _dropped: set[str] = PrivateAttr(default_factory=set)  # names of what was accepted and changes nothing

    def close(self, lenient: bool = False, within: str = "") -> None:
        """Drops the fields that nobody knows. Raises UnsupportedField for one that says something; with `lenient`
        it is dropped as well, and named. `within`: the field that this is a part of, for the error."""
        for name, value in (self.model_extra or {}).items():
            hint = self.hints.get(name)
            if says_nothing(value) or (hint is not None and value in hint.nothing):
                continue
            if not lenient:
                raise _unknown(type(self), [name], within)
            self._dropped.add(name)
        if self.model_extra:
            self.model_extra.clear()

    @property
    def dropped(self) -> set[str]:
        return self._dropped

    @classmethod
    def states(cls) -> dict[str, str]:
        """Known fields: "works", "dropped", or "refused" when they say something. Those of a part are "part.field"."""
        parts = cls._parts()
        within = {f"{part}.{name}": state for part, kind in parts.items() for name, state in kind.states().items()}
        works = dict.fromkeys((name for name in cls.model_fields if name not in parts), "works")
        return {**dict.fromkeys(cls.hints, "refused"), **works, **within, **dict.fromkeys(cls.labels, "dropped")}

    @classmethod
    def all_hints(cls) -> dict[str, Hint]:
        """Those of its parts, too."""
        within = {f"{part}.{name}": hint for part, kind in cls._parts().items() for name, hint in kind.hints.items()}
        return {**cls.hints, **within}

    @classmethod
    def _parts(cls) -> dict[str, type[Open]]:
        """Fields that have fields."""
        kinds = {name: get_args(f.annotation) or (f.annotation,) for name, f in cls.model_fields.items()}
        return {name: kind for name, found in kinds.items() for kind in found
                if isinstance(kind, type) and issubclass(kind, Open)}  # fmt: skip


def says_nothing(value: object) -> bool:
    return any(value is n or (type(value) is type(n) and value == n) for n in _NOTHING)


def warnings_header(dropped: Iterable[str]) -> dict[str, str]:
    """The header that names what was dropped; none when nothing was. Names may be a client's."""
    names = sorted({name if _NAME.fullmatch(name) else "?" for name in dropped})
    more = f", and {len(names) - _WARNED} more" if len(names) > _WARNED else ""
    return {"x-lmkit-warnings": f"dropped: {', '.join(names[:_WARNED])}{more}"} if names else {}


class Echoed(Strict):
    """What clients send back from answers and decorate: names that are not declared are allowed."""

    model_config = ConfigDict(extra="allow")


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
    type: Literal["function"]
    function: Function


_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
Model = TypeVar("Model", bound=Strict)


def parse(kind: type[Model], body: bytes | bytearray, most: int = MAX_IDS, lenient: bool = False) -> Model:
    """A request from its JSON body; `most`: values that it can be of use to have; `lenient`: unknown fields are
    dropped. Raises RequestError that names the first wrong field."""
    check_shape(body, min(most, kind.max_values))
    try:
        request = kind.model_validate_json(body)
    except ValidationError as e:
        raise _explain(kind, e, body) from None
    if isinstance(request, Open):
        request.close(lenient)
    return request


def _explain(kind: type[BaseModel], error: ValidationError, body: bytes | bytearray) -> RequestError:
    if error.error_count() > _MAX_ERRORS:  # a description of each would take longer than reading the body
        unknown = next((name for name in _names(body) if name not in _known(kind)), None)
        if unknown is not None:
            return _unknown(kind, [unknown])
        return InvalidBody(f"{error.error_count()} fields of the body are wrong or unknown")
    problems = error.errors(include_url=False, include_context=True, include_input=len(body) <= _SHOWN)
    surplus = next((p for p in problems if p["type"] == "extra_forbidden"), None)
    problem = surplus or _most_specific(problems)
    path = [str(p) for p in problem["loc"] if not _is_branch(str(p))]
    field = _field(path)
    if problem["type"] == "json_invalid":
        return InvalidBody(f"the body is not valid JSON: {problem['msg'].split(': ', 1)[-1]}"[:300])
    if surplus is not None:
        return _unknown(kind, path)
    if problem["type"] == "missing":
        return InvalidBody(f"{field} is required", field)
    return InvalidParam(field, _short(problem.get("input", "...")), _needs(problem))


def _known(kind: type[BaseModel]) -> dict[str, None]:
    return {field.alias or name: None for name, field in kind.model_fields.items()}


def _names(body: bytes | bytearray) -> list[str]:
    """The names of the members of the body, which is an object."""
    try:
        return list(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
    except msgspec.DecodeError:
        return []


def _unknown(kind: type[BaseModel], path: list[str], within: str = "") -> RequestError:
    field = _field(path)
    hint = getattr(kind, "hints", {}).get(field)
    like = get_close_matches(path[-1][:100], list(_known(kind) if len(path) == 1 else ()), 1, _ALIKE)
    fix = hint.fix if hint else f"did you mean {like[0]!r}?" if like else "leave it out"
    field = f"{within}.{field}" if within else field
    return UnsupportedField(field, f"unknown or unsupported field {field!r}", fix=fix)


def _field(path: list[str]) -> str:
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
