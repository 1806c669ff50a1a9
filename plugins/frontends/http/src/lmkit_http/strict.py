"""JSON bodies read strictly: closed, bounded, and an error names the first wrong field. For dialects of any kind."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from lmkit.api import MAX_TOKENS, InvalidParam, RequestError, nearest
from lmkit.front.ask import UnsupportedField
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from lmkit_http.shape import check_shape

MAX_MESSAGES = 8192
MAX_TOOLS = 512
MAX_TEXT = 32 << 20  # characters; the body limit is usually lower
MAX_VALUES = 1 << 17  # of all lists and objects of a body together
MAX_IDS = 5 << 18  # the same, where token ids may be given
_SHOWN = 1 << 18  # bytes of a body, the wrong values of which are shown
_MAX_ERRORS = 64  # wrong fields that are looked at, to name the first

Name = Annotated[str, Field(min_length=1, max_length=256)]
Label = Annotated[str, Field(max_length=512)]
Content = Annotated[str, Field(max_length=MAX_TEXT)]
TokenId = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]
Ids = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_TOKENS)]
Json = Annotated[dict[str, JsonValue], Field(max_length=1024)]


class Strict(BaseModel):
    max_values: ClassVar[int] = MAX_VALUES
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)  # aliases are names that pydantic has


class Part(Strict):
    type: Literal["text", "refusal"]
    text: Content | None = None
    refusal: Content | None = None


class FunctionCall(Strict):
    name: Name
    arguments: Content


class ToolCall(Strict):
    id: Label | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Annotated[int, Field(ge=0, le=4096)] | None = None


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | Annotated[list[Part], Field(fail_fast=True, min_length=1, max_length=4096)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=1024)] | None = None
    tool_call_id: Label | None = None
    reasoning_content: Content | None = None
    reasoning: Content | None = None
    refusal: Content | None = None
    # what official clients send back from an answer; nothing to honour in it
    annotations: Annotated[list[JsonValue], Field(fail_fast=True, max_length=1024)] | None = None
    audio: None = None
    function_call: None = None


class Function(Strict):
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: Content | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
Model = TypeVar("Model", bound=Strict)


def parse(kind: type[Model], body: bytes | bytearray, most: int = MAX_IDS) -> Model:
    """A request from its JSON body; `most`: values that it can be of use to have. Raises RequestError that names the
    first wrong field."""
    check_shape(body, min(most, kind.max_values))
    try:
        return kind.model_validate_json(body)
    except ValidationError as e:
        raise _explain(kind, e, body) from None


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


def _unknown(kind: type[BaseModel], path: list[str]) -> RequestError:
    field = _field(path)
    like = nearest(path[-1][:100], _known(kind) if len(path) == 1 else ())
    fix = f"did you mean {like!r}?" if like else "leave it out"
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
            _check_arguments(call.function.arguments, f"messages.{i}.tool_calls.{j}.function.arguments")


def _check_arguments(text: str, field: str) -> None:
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
