"""Requests of the OpenAI dialects: strict, closed, bounded. What is accepted is honoured, the rest refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from lmkit.api import Grammar, InvalidParam, RequestError, SamplingParams, ToolChoice, ToolDef, nearest
from lmkit.api.params import MAX_BIAS, MAX_LOGPROBS, MAX_STOP, MAX_STOP_IDS, MAX_TOKENS, MIN_REPETITION
from lmkit.text.constrain import TOOL_NAME
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from lmkit_http.errors import UnsupportedField
from lmkit_http.shape import check_shape

MAX_N = 64
MAX_PROMPTS = 256
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
StopText = Annotated[str, Field(min_length=1, max_length=1024)]
ChoiceText = Annotated[str, Field(min_length=1, max_length=4096)]
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


class NamedFunction(Strict):
    name: Name


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchemaFormat(Strict):
    name: Label | None = None
    description: Content | None = None
    schema_: Json | bool | None = Field(None, alias="schema")
    strict: bool | None = None  # it is always kept to the letter


class ResponseFormat(Strict):
    """structural_tag has either `format` or `structures` and `triggers`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: Json | None = None
    structures: Annotated[list[Json], Field(fail_fast=True, max_length=1024)] | None = None
    triggers: Annotated[list[Label], Field(fail_fast=True, max_length=1024)] | None = None

    def grammar(self) -> Grammar | None:
        """Raises UnsupportedField."""
        extra = {"json_schema": ("json_schema",), "structural_tag": ("format", "structures", "triggers")}
        known = extra.get(self.type, ())
        for name in ("json_schema", "format", "structures", "triggers"):
            if getattr(self, name) is not None and name not in known:
                raise UnsupportedField(f"response_format.{name}", f"{self.type!r} does not take {name}")
        if self.type == "json_object":
            return Grammar("json_object", "")
        if self.type == "json_schema":
            if self.json_schema is None or self.json_schema.schema_ is None:
                field = "response_format.json_schema" + (".schema" if self.json_schema else "")
                raise InvalidBody(f"{field} is required", field)
            return Grammar("json_schema", _dumps(self.json_schema.schema_))
        if self.type == "structural_tag":
            return Grammar("structural_tag", _dumps(self.model_dump(exclude_none=True)))
        return None


class StructuredOutputs(Strict):
    """Exactly one constraint."""

    json_: Json | bool | Content | None = Field(None, alias="json")
    regex: Content | None = None
    choice: Annotated[list[ChoiceText], Field(fail_fast=True, min_length=1, max_length=10_000)] | None = None
    grammar: Content | None = None
    json_object: bool | None = None
    structural_tag: Json | Content | None = None
    backend: Annotated[str, Field(max_length=64)] | None = None

    def as_grammar(self) -> Grammar:
        """Raises UnsupportedField, InvalidParam."""
        names = ("json_", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [n for n in names if getattr(self, n) not in (None, False)]
        if len(given) != 1:
            shown = ", ".join(n.strip("_") for n in given) or "none"
            raise UnsupportedField("structured_outputs", f"exactly one constraint is needed, got {shown}")
        value = getattr(self, given[0])
        text = value if isinstance(value, str) else "" if value is True else _dumps(value)
        kind: Any = {"json_": "json_schema", "grammar": "ebnf" if "::=" in text else "lark"}.get(given[0], given[0])
        return Grammar(kind, "true" if given[0] == "json_" and value is True else text, self.backend)


class Sampling(Strict):
    """Fields common to both dialects."""

    model: Annotated[str, Field(max_length=512)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Field(fail_fast=True, max_length=MAX_STOP)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: (
        Annotated[dict[Annotated[str, Field(max_length=12)], Annotated[float, Field(ge=-100, le=100)]],
                  Field(max_length=MAX_BIAS)] | None
    ) = None  # fmt: skip
    user: Label | None = None
    # extensions, see lmkit_http.extensions
    top_k: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), le=1 << 31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    return_token_ids: bool | None = None
    resume: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def answer_field(self) -> str:
        """The field that constrains the answer."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    def answer_grammar(self) -> Grammar | None:
        """The constraint on the text of the answer. Raises RequestError."""
        grammar = self.response_format.grammar() if self.response_format is not None else None
        if self.structured_outputs is None:
            return grammar
        if grammar is not None:
            raise UnsupportedField("structured_outputs", "structured_outputs and response_format exclude each other")
        return self.structured_outputs.as_grammar()

    def check(self) -> None:
        """What the types cannot say. Raises RequestError."""
        if self.answer_grammar() is not None:
            for name in ("ignore_eos", "min_tokens"):
                if getattr(self, name):
                    raise UnsupportedField(name, f"{name} and {self.answer_field} exclude each other")
        if self.stream_options is not None and not self.stream:
            raise UnsupportedField("stream_options", "stream_options is only allowed with stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise UnsupportedField("prompt_logprobs", "prompt_logprobs is not available with stream=true")

    def params(self, defaults: Mapping[str, Any], max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """`defaults`: what the checkpoint recommends. Raises InvalidParam."""
        given: dict[str, Any] = dict(defaults)
        names = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "seed", "stop",
                 "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "prompt_logprobs")  # fmt: skip
        given |= {k: v for k in names if (v := getattr(self, k)) is not None}
        if given.get("top_k") == -1:
            given["top_k"] = 0
        return SamplingParams(
            max_tokens=max_tokens, logprobs=logprobs, logit_bias=_bias(self.logit_bias or {}), **given
        )


class ChatRequest(Sampling):
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    # labels that change nothing in the answer
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], Label], Field(max_length=16)] | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True, max_length=1)] | None = None
    # extensions
    chat_template_kwargs: Annotated[Json, Field(max_length=64)] | None = None
    include_reasoning: bool | None = None
    documents: Annotated[list[Json], Field(fail_fast=True, max_length=1024)] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise UnsupportedField("top_logprobs", "top_logprobs needs logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise UnsupportedField("max_tokens", "max_tokens and max_completion_tokens exclude each other")
        check_calls(self.messages)
        for i, message in enumerate(self.messages):
            _check_message(message, f"messages.{i}")
        self._check_tools()
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise UnsupportedField(
                    "continue_final_message", "continue_final_message and add_generation_prompt exclude each other"
                )
            if self.messages[-1].role != "assistant" or not self.messages[-1].content:
                raise UnsupportedField(
                    "continue_final_message", "continue_final_message needs a final assistant message with content"
                )

    def _check_tools(self) -> None:
        names = [t.function.name for t in self.tools or ()]
        if len(set(names)) != len(names):
            raise UnsupportedField("tools", "two tools have the same name")
        for i, name in enumerate(names):
            if not TOOL_NAME.fullmatch(name):
                field = f"tools.{i}.function.name"
                raise InvalidParam(field, name, "letters, digits and any of _ . : / @ $ -, at most 128")
        choice = self.tool_choice
        if choice in (None, "none"):
            return
        if not self.tools:
            raise UnsupportedField("tool_choice", "tool_choice needs tools")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            shown = ", ".join(names[:20])
            raise UnsupportedField("tool_choice", f"there is no tool {choice.function.name!r} (there is: {shown})")
        if choice != "auto" and self.structured_outputs is not None:
            raise UnsupportedField(
                "structured_outputs", "structured_outputs and a tool_choice that demands a call exclude each other"
            )

    @property
    def choice(self) -> ToolChoice:
        if isinstance(self.tool_choice, NamedTool):
            return ToolChoice("named", self.tool_choice.function.name)
        return ToolChoice(self.tool_choice or "auto")

    def tool_defs(self) -> list[ToolDef]:
        """The tools the model may call; none with tool_choice "none"."""
        if self.tool_choice == "none":
            return []
        return [
            ToolDef(t.function.name, t.function.description or "", t.function.parameters or {}, bool(t.function.strict))
            for t in self.tools or ()
        ]

    def final_text(self) -> str:
        """The text of the last message."""
        content = self.messages[-1].content
        return content if isinstance(content, str) else "\n".join(p.text or "" for p in content or ())

    def template_messages(self) -> list[dict[str, Any]]:
        """For the chat template: both names of reasoning, and only fields that were sent."""
        shaped = []
        for message in self.messages:
            m = message.model_dump(exclude_none=True, exclude={"annotations", "refusal"})
            reasoning = m.pop("reasoning", None) or m.get("reasoning_content")
            if reasoning:
                m["reasoning_content"] = m["reasoning"] = reasoning
            if message.role == "developer":
                m["role"] = "system"
            if isinstance(m.get("content"), list):
                m["content"] = [{"type": "text", "text": p.get("text") or p.get("refusal") or ""} for p in m["content"]]
            shaped.append(m)
        return shaped


class CompletionRequest(Sampling):
    max_values: ClassVar[int] = MAX_IDS
    prompt: Annotated[
        Content | Ids
        | Annotated[list[Content], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Ids], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)],
        Field(union_mode="left_to_right"),
    ]  # fmt: skip
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: None = None
    best_of: Literal[1] | None = None
    # extensions
    add_special_tokens: bool | None = None

    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)


class LoadAdapterRequest(Strict):
    lora_name: Annotated[str, Field(min_length=1, max_length=128)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadAdapterRequest(Strict):
    lora_name: Annotated[str, Field(min_length=1, max_length=128)]


class TokenizeRequest(Strict):
    """Of text (`prompt`) or of messages."""

    model: Annotated[str, Field(max_length=512)] | None = None
    prompt: Content | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[Json, Field(max_length=64)] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    max_values: ClassVar[int] = MAX_IDS
    model: Annotated[str, Field(max_length=512)] | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_TOKENS)]


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
    """Of the branches of a union, the one that got furthest, and whose type was right."""
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


def _check_message(message: Message, field: str) -> None:
    if message.tool_calls and message.role != "assistant":
        raise UnsupportedField(f"{field}.tool_calls", "only assistant messages have tool_calls")
    if message.role in ("user", "system", "developer", "tool") and message.content is None:
        raise InvalidBody(f"{field}.content is required", f"{field}.content")
    for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
        if (part.text if part.type == "text" else part.refusal) is None:
            raise InvalidBody(f"{field}.content.{j}.{part.type} is required", f"{field}.content.{j}.{part.type}")


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


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _bias(bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in bias.items():
        if not key.isascii() or not key.isdigit():
            raise InvalidParam("logit_bias", key, "token ids as keys")
        pairs.append((int(key), value))
    return tuple(pairs)


encode_json = msgspec.json.Encoder().encode
