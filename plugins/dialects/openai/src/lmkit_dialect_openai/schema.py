"""Requests of the OpenAI dialect: bounded; what is accepted is honoured, the rest refused or named as dropped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from lmkit.api import (
    MAX_BIAS,
    MAX_LOGPROBS,
    MAX_STOP,
    MAX_STOP_IDS,
    MAX_TOKENS,
    MIN_REPETITION,
    Beams,
    Grammar,
    InvalidParam,
    SamplingParams,
    Tokenizer,
    ToolChoice,
)
from lmkit_formats import closed
from lmkit_http.dialect import Served, UnsupportedField
from lmkit_http.strict import (
    MAX_IDS,
    MAX_MESSAGES,
    MAX_TOOLS,
    NUMBER,
    Content,
    Ids,
    InvalidBody,
    Json,
    Label,
    Message,
    Name,
    Open,
    OutputTokens,
    Refused,
    Strict,
    TokenId,
    Tool,
    check_calls,
)
from pydantic import BeforeValidator, Field

from lmkit_dialect_openai.fields import CHAT_REFUSED, COMPLETIONS_DROPPABLE, COMPLETIONS_REFUSED, DROPPABLE, REFUSED

MAX_N = 64
MAX_PROMPTS = 256
MAX_PROCESSORS = 16
MAX_WORDS = 256

Word = Annotated[str, Field(min_length=1, max_length=256)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]


def _stops(value: Any) -> Any:
    """Without empty texts, which stop nothing."""
    return [text for text in value if text != ""] if isinstance(value, list) else value or None


ChoiceText = Annotated[str, Field(min_length=1, max_length=4096)]


class NamedFunction(Strict):
    name: Name


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class StreamOptions(Strict):
    droppable: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": ()}  # answers are not padded
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # each chunk has the usage until there


class JsonSchemaFormat(Strict):
    name: Label | None = None
    description: Content | None = None
    schema_: Json | bool | None = Field(None, alias="schema")
    strict: bool | None = None  # it is always kept to the letter


class ResponseFormat(Strict):
    """structural_tag has either `format` or `structures` and `triggers`; json_object may have a `schema`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Json | bool | None = Field(None, alias="schema")
    format: Json | None = None
    structures: Annotated[list[Json], Field(fail_fast=True, max_length=1024)] | None = None
    triggers: Annotated[list[Label], Field(fail_fast=True, max_length=1024)] | None = None

    def grammar(self) -> Grammar | None:
        """Raises UnsupportedField."""
        extra = {
            "json_schema": ("json_schema",),
            "json_object": ("schema_",),
            "structural_tag": ("format", "structures", "triggers"),
        }
        known = extra.get(self.type, ())
        for name in ("json_schema", "format", "structures", "triggers"):
            if getattr(self, name) is not None and name not in known:
                raise UnsupportedField(f"response_format.{name}", f"{self.type!r} does not take {name}")
        if self.type == "json_object":
            return Grammar("json_object", "") if self.schema_ is None else _of_schema(self.schema_)
        if self.type == "json_schema":
            if self.json_schema is None or self.json_schema.schema_ is None:
                field = "response_format.json_schema" + (".schema" if self.json_schema else "")
                raise InvalidBody(f"{field} is required", field)
            return _of_schema(self.json_schema.schema_)
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
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: bool | None = None  # objects with properties have no others unless they say so
    whitespace_pattern: None = None
    backend: Annotated[str, Field(max_length=64)] | None = None

    def as_grammar(self) -> Grammar:
        """Raises UnsupportedField, InvalidParam."""
        names = ("json_", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [n for n in names if getattr(self, n) not in (None, False)]
        if len(given) != 1:
            shown = ", ".join(n.strip("_") for n in given) or "none"
            raise UnsupportedField("structured_outputs", f"exactly one constraint is needed, got {shown}")
        value = getattr(self, given[0])
        if given[0] == "json_":
            value = closed(_loaded(value))
        text = value if isinstance(value, str) else "" if value is True else _dumps(value)
        kind: Any = {"json_": "json_schema", "grammar": "ebnf" if "::=" in text else "lark"}.get(given[0], given[0])
        return Grammar(kind, "true" if given[0] == "json_" and value is True else text, self.backend)


class Sampling(Open):
    """Fields common to both routes."""

    refused: ClassVar[Mapping[str, Refused]] = REFUSED
    droppable: ClassVar[Mapping[str, tuple[Any, ...]]] = DROPPABLE
    model: Annotated[str, Field(max_length=512)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100), NUMBER] | None = None
    top_p: Annotated[float, Field(ge=0, le=1), NUMBER] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2), NUMBER] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2), NUMBER] | None = None
    max_tokens: OutputTokens | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N), NUMBER] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1), NUMBER] | None = None
    stop: Annotated[
        StopText | Annotated[list[StopText], Field(fail_fast=True, max_length=MAX_STOP)] | None, BeforeValidator(_stops)
    ] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: (
        Annotated[dict[Annotated[str, Field(max_length=12)], Annotated[float, Field(ge=-100, le=100), NUMBER]],
                  Field(max_length=MAX_BIAS)] | None
    ) = None  # fmt: skip
    # extensions, see lmkit_dialect_openai.extensions
    top_k: Annotated[int, Field(ge=-1, le=1 << 31), NUMBER] | None = None
    min_p: Annotated[float, Field(ge=0, le=1), NUMBER] | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION, le=100), NUMBER] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS), NUMBER] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None  # another name for it
    stop_in: Literal["content", "output"] | None = None  # output: `stop` is also about reasoning and calls
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), NUMBER] | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), le=1 << 31), NUMBER] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    return_token_ids: bool | None = None
    resume: bool | None = None
    vllm_xargs: Annotated[dict[Label, Json], Field(max_length=MAX_PROCESSORS)] | None = None  # of logits processors
    bad_words: Annotated[list[Word], Field(fail_fast=True, max_length=MAX_WORDS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=1 << 17)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKENS), NUMBER] | None = None
    truncation_side: Literal["left"] | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: Label | None = None  # comes back in a header
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    use_beam_search: bool | None = None  # the answers are the n best that a search with as many beams finds
    length_penalty: Annotated[float, Field(ge=-10, le=10), NUMBER] | None = None
    early_stopping: bool | Literal["never"] | None = None

    def last(self, served: Served, max_tokens: int | None) -> int | None:
        """How many tokens of the prompt's end are read; -1 leaves room for the output."""
        if self.truncate_prompt_tokens != -1:
            return self.truncate_prompt_tokens
        return served.prompt_room(max_tokens)

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
        options = self.stream_options
        if options is not None and not self.stream:
            self.dropped.add("stream_options")
        if self.truncate_prompt_tokens == 0:
            raise UnsupportedField("truncate_prompt_tokens", "truncate_prompt_tokens is a number of tokens, or -1")
        self._check_search()
        if self.prompt_logprobs is not None and self.stream:
            raise UnsupportedField("prompt_logprobs", "prompt_logprobs is not available with stream=true")

    def _check_search(self) -> None:
        if self.use_beam_search:
            if self.stream:
                raise UnsupportedField("stream", "what a beam search finds is known at its end: it is not streamed")
            return
        for name, usual in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(self, name) not in (None, usual):
                raise UnsupportedField(name, f"{name} needs use_beam_search=true")

    @property
    def includes_stop(self) -> bool:
        """True when the text that ended the answer is part of it."""
        return bool(self.include_stop_str_in_output or self.no_stop_trim)

    def beams(self, width: int) -> Beams | None:
        """The search that is asked for, if one is. Raises InvalidParam."""
        if not self.use_beam_search:
            return None
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        return Beams(width, length_penalty=penalty, early_stopping=self.early_stopping or False)

    def params(self, served: Served, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Raises RequestError. The checkpoint's own defaults are for sampling, and a search does not sample."""
        given: dict[str, Any] = {} if self.use_beam_search else dict(served.default_params)
        names = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "seed", "stop",
                 "stop_in", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos",
                 "prompt_logprobs")  # fmt: skip
        given |= {k: v for k in names if (v := getattr(self, k)) is not None}
        if given.get("top_k") == -1:
            given["top_k"] = 0
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            logit_bias=_bias(self.logit_bias or {}),
            extra=self._extra(served.tokenizer),
            **given,
        )

    def _extra(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """What logits processors are told; two of them have fields of their own. Raises UnsupportedField."""
        found: dict[str, Any] = dict(self.vllm_xargs or {})
        fields: dict[str, list[Any]] = {"allowed_token_ids": self.allowed_token_ids or []}
        # as it is written where a text begins, and after a blank
        forms = [tuple(tokenizer.encode(f"{blank}{word.lstrip()}", add_special=False))
                 for word in self.bad_words or () for blank in ("", " ")]  # fmt: skip
        fields["bad_words"] = [list(form) for form in dict.fromkeys(forms) if form]
        for name, ids in fields.items():
            if ids and name in found:
                raise UnsupportedField(name, f"{name} and vllm_xargs.{name} exclude each other")
            if ids:
                found[name] = {"ids": ids}
        return found


class ReasoningOptions(Strict):
    """How long the model thinks, in one object as OpenRouter takes it."""

    droppable: ClassVar[Mapping[str, tuple[Any, ...]]] = {"summary": (), "generate_summary": ()}
    effort: Annotated[str, Field(max_length=32)] | None = None
    enabled: bool | None = None
    max_tokens: OutputTokens | None = None
    exclude: bool | None = None  # reasoning is not shown


class ThinkingSwitch(Strict):
    """Whether the model thinks, as DeepSeek, GLM and Anthropic take it."""

    droppable: ClassVar[Mapping[str, tuple[Any, ...]]] = {"clear_thinking": ()}
    type: Literal["enabled", "disabled", "adaptive", "auto"] | None = None
    budget_tokens: OutputTokens | None = None


class ChatRequest(Sampling):
    refused: ClassVar[Mapping[str, Refused]] = CHAT_REFUSED
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: OutputTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), NUMBER] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    # other names of it
    reasoning: ReasoningOptions | None = None
    thinking: ThinkingSwitch | bool | None = None
    enable_thinking: bool | None = None
    thinking_budget: Annotated[int, Field(ge=0, le=MAX_TOKENS), NUMBER] | None = None
    # extensions
    chat_template_kwargs: Annotated[Json, Field(max_length=64)] | None = None
    include_reasoning: bool | None = None
    documents: Annotated[list[Json], Field(fail_fast=True, max_length=1024)] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=MAX_TOKENS), NUMBER] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise UnsupportedField("top_logprobs", "top_logprobs needs logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            self.dropped.add("max_tokens")  # which the other replaces
        check_calls(self.messages)
        self._check_tools()
        if self.use_beam_search and self.tools and self.tool_choice != "none":
            raise UnsupportedField("tools", "calls are no part of a beam search: leave out tools or use_beam_search")
        if self.continue_final_message and self.add_generation_prompt:
            raise UnsupportedField(
                "continue_final_message", "continue_final_message and add_generation_prompt exclude each other"
            )

    def _check_tools(self) -> None:
        """Beside what an ask checks."""
        if self.tool_choice in (None, "none"):
            return
        if not self.tools:
            if self.tool_choice == "auto":
                return  # among none
            raise UnsupportedField("tool_choice", "tool_choice needs tools")
        if self.tool_choice != "auto" and self.structured_outputs is not None:
            raise UnsupportedField(
                "structured_outputs", "structured_outputs and a tool_choice that demands a call exclude each other"
            )

    @property
    def effort(self) -> str | None:
        """The effort of reasoning, under whichever name it was sent: "none" does not think."""
        named = self.reasoning_effort or (self.reasoning and self.reasoning.effort)
        if named:
            return named
        thinking = self.thinking
        if isinstance(thinking, ThinkingSwitch):
            thinking = None if thinking.type in (None, "auto") else thinking.type != "disabled"
        switches = (self.reasoning and self.reasoning.enabled, thinking, self.enable_thinking)
        thinks = next((switch for switch in switches if switch is not None), None)
        return None if thinks is None else "medium" if thinks else "none"

    @property
    def reasoning_budget(self) -> int | None:
        """Tokens of reasoning, under whichever name they were sent."""
        named = self.thinking_token_budget if self.thinking_token_budget is not None else self.thinking_budget
        if named is not None:
            return named
        switch = self.thinking.budget_tokens if isinstance(self.thinking, ThinkingSwitch) else None
        return switch or (self.reasoning and self.reasoning.max_tokens) or None

    @property
    def shows_reasoning(self) -> bool:
        return self.include_reasoning is not False and not (self.reasoning and self.reasoning.exclude)

    @property
    def choice(self) -> ToolChoice:
        if isinstance(self.tool_choice, NamedTool):
            return ToolChoice("named", self.tool_choice.function.name)
        return ToolChoice(self.tool_choice or "auto")


class CompletionRequest(Sampling):
    refused: ClassVar[Mapping[str, Refused]] = COMPLETIONS_REFUSED
    droppable: ClassVar[Mapping[str, tuple[Any, ...]]] = COMPLETIONS_DROPPABLE
    max_values: ClassVar[int] = MAX_IDS
    prompt: Annotated[
        Content | Ids
        | Annotated[list[Content], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Ids], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)],
        Field(union_mode="left_to_right"),
    ]  # fmt: skip
    max_tokens: Literal[0] | OutputTokens | None = None  # 0: nothing but the echo
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), NUMBER] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N), NUMBER] | None = None
    # extensions
    add_special_tokens: bool | None = None

    @property
    def num_answers(self) -> int:
        """To each prompt; n of them are shown. A search with `best_of` beams finds the n best by itself."""
        return (not self.use_beam_search and self.best_of) or self.n or 1

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise UnsupportedField("best_of", f"best_of={self.best_of} answers are fewer than n={self.n}")
        if self.num_answers > (self.n or 1) and self.stream:
            raise UnsupportedField("best_of", "which answers are the best is known when all have ended: not streamed")

    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)


def _of_schema(schema: Any) -> Grammar:
    return Grammar("json_schema", _dumps(closed(schema)))


def _loaded(schema: Any) -> Any:
    """A schema may come as text; one that is no object is refused where grammars are read."""
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError):
        return schema
    return found if isinstance(found, dict) else schema


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _bias(bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in bias.items():
        if not key.isascii() or not key.isdigit():
            raise InvalidParam("logit_bias", key, "token ids as keys")
        pairs.append((int(key), value))
    return tuple(pairs)
