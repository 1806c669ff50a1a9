"""What is asked for, whoever asks: frozen, and checked once, when it is made. Wrong values raise RequestError.

A dialect makes an ask of a body, `LLM` of its arguments, a command of its options; `prepare` takes it from there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lmkit.api import Beams, InvalidParam, PoolingParams, RequestError, SamplingParams, ToolChoice, ToolDef
from lmkit.text.constrain import TOOL_NAME
from lmkit.text.tools import tool_def

Prompt = str | Sequence[int]
PromptInput = Prompt | Mapping[str, Any]  # {"prompt": TEXT} or {"prompt_token_ids": IDS}, too
Prompts = PromptInput | Sequence[PromptInput]
Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")

PROMPT = "a text or a list of token ids"
_MAY_SAY_NOTHING = ("assistant", "tool")  # roles of messages without content
MESSAGES = "a list of messages like {'role': 'user', 'content': 'Hello'}"


class UnsupportedField(RequestError):
    """A field, or a value of it, that cannot be honoured."""

    code = "unsupported"

    def __init__(self, field: str, message: str, *, fix: str = "") -> None:
        self.field = field
        super().__init__(message, fix=fix)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What all asks have."""

    adapter: str | None = None
    priority: int = 0  # smaller is sooner
    salt: str | None = None  # prompts with different ones share nothing of the cache
    prompt_field: str = "prompt"  # what the client calls the prompt, for errors
    dropped: set[str] | None = None  # names of the client's fields that change nothing; None: they are refused


@dataclass(frozen=True, kw_only=True)
class GenerateAsk(Ask):
    """What all asks for text have. A `grammar` in `params` is about the answer: of a chat, what follows its reasoning.

    `resume`: whether another engine goes on when this one dies; None: where that cannot be told from the answer.
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1  # independent answers to each prompt, with the seeds seed, seed + 1, ...
    resume: bool | None = None
    include_stop: bool = False  # the text that ended the answer is part of it
    skip_special: bool = True  # special tokens are not shown
    grammar_field: str = "grammar"  # what the client calls the grammar, for errors
    default_tokens: int | None = None  # without `params.max_tokens` so many if they fit; None: as many as fit
    beams: Beams | None = None  # the answers are the best that a beam search finds, and come at its end
    last: int | None = None  # of longer prompts only so many tokens at their end are read; -1: as many as fit

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise InvalidParam("n", self.n, "an integer, at least 1")


@dataclass(frozen=True, kw_only=True)
class TextAsk(GenerateAsk):
    """Prompts that are to be continued: texts or token ids. Answer i of prompt p has the index p * n + i."""

    prompts: Sequence[Prompt]
    add_special: bool = True  # the tokenizer's special tokens around texts
    shows_prompts: bool = False  # the text of token ids is wanted, too
    scores_each: bool = False  # prompt log-probabilities come with each answer, not with the first alone


@dataclass(frozen=True, kw_only=True)
class ChatAsk(GenerateAsk):
    """A conversation that is to be answered. `tools` as in the OpenAI API; messages are kept as templates read them."""

    messages: Messages
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_calls: bool = True
    # calls of these tools (True: all) come when they are complete, and those that were cut as the text that was written
    whole_calls: bool | Collection[str] = False
    template_options: Mapping[str, Any] = field(default_factory=dict)
    effort: str | None = None  # of reasoning
    effort_field: str = "reasoning_effort"  # what the client calls it
    documents: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    continue_final: bool = False  # the answer goes on with the last message
    thinking_budget: int | None = None  # tokens
    places: Sequence[str] = ()  # what the client calls each of the messages, where that is not messages.0, messages.1
    tool_defs: Sequence[ToolDef] = field(init=False)  # those that may be called

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "messages", [_message(i, m) for i, m in enumerate(self.messages)])
        object.__setattr__(self, "tool_defs", [tool_def(tool) for tool in self.tools])
        self._check_tools()
        if self.tool_choice.mode == "none":
            object.__setattr__(self, "tools", ())
            object.__setattr__(self, "tool_defs", ())
        last = self.messages[-1]
        if self.continue_final and (last["role"] != "assistant" or not last.get("content")):
            raise UnsupportedField(
                "continue_final_message", "continue_final_message needs a final assistant message with content"
            )

    def _check_tools(self) -> None:
        names = [tool.name for tool in self.tool_defs]
        if len(set(names)) != len(names):
            raise UnsupportedField("tools", "two tools have the same name")
        for i, name in enumerate(names):
            if not TOOL_NAME.fullmatch(name):
                field = f"tools.{i}.function.name"
                raise InvalidParam(field, name, "letters, digits and any of _ . : / @ $ -, at most 128")
        choice = self.tool_choice
        if choice.mode in ("required", "named") and not names:
            raise UnsupportedField("tool_choice", "tool_choice needs tools")
        if choice.mode == "named" and choice.name not in names:
            shown = ", ".join(names[:20])
            raise UnsupportedField("tool_choice", f"there is no tool {choice.name!r} (there is: {shown})")

    @property
    def final_text(self) -> str:
        """The text of the message that the answer goes on with; "" when it begins anew."""
        if not self.continue_final:
            return ""
        content = self.messages[-1]["content"]
        return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


@dataclass(frozen=True, kw_only=True)
class VectorAsk(Ask):
    """What all asks for vectors have. `limit`: longer prompts are cut to so many tokens, special ones kept; None: they
    are refused."""

    limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class PoolAsk(VectorAsk):
    """Vectors of prompts, or of one conversation as the chat template renders it."""

    prompts: Sequence[Prompt] = ()
    chat: ChatAsk | None = None
    params: PoolingParams | None = None  # None: the model's own task
    add_special: bool = True


@dataclass(frozen=True, kw_only=True)
class ScoreAsk(VectorAsk):
    """How well documents answer queries, pair by pair; one query goes with every document."""

    queries: Sequence[str]
    documents: Sequence[str]
    activation: bool | None = None

    def __post_init__(self) -> None:
        for name, texts in (("queries", self.queries), ("documents", self.documents)):
            if not texts or not all(isinstance(text, str) for text in texts):
                raise InvalidParam(name, texts, "at least one text")
        if len(self.queries) not in (1, len(self.documents)):
            limit = f"one, or as many as documents ({len(self.documents)})"
            raise InvalidParam("queries", len(self.queries), limit)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """(query, document) for each document."""
        queries = self.queries if len(self.queries) > 1 else [*self.queries] * len(self.documents)
        return list(zip(queries, self.documents, strict=True))


def _message(number: int, message: object) -> dict[str, Any]:
    """For chat templates: both names of reasoning, one name of the system role, and only what is there."""
    where = f"messages[{number}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidParam(where, message, "a mapping with role and content")
    content = message.get("content")
    if not (isinstance(content, str) or is_list(content) or (content is None and message["role"] in _MAY_SAY_NOTHING)):
        raise InvalidParam(f"{where}.content", content, "a text")
    shaped = {k: v for k, v in message.items() if v is not None and k not in ("annotations", "refusal", "reasoning")}
    if reasoning := message.get("reasoning") or message.get("reasoning_content"):
        shaped["reasoning_content"] = shaped["reasoning"] = reasoning
    if shaped["role"] == "developer":
        shaped["role"] = "system"
    if content is not None and not isinstance(content, str):
        shaped["content"] = [_part(f"{where}.content[{j}]", part) for j, part in enumerate(content)]
    if calls := shaped.get("tool_calls"):
        shaped["tool_calls"] = _calls(f"{where}.tool_calls", calls)
    return shaped


def _part(where: str, part: object) -> dict[str, Any]:
    """A text part of a content."""
    named = [part.get("text"), part.get("refusal")] if isinstance(part, Mapping) else []
    texts = [text for text in named if isinstance(text, str)]
    if not texts:
        raise InvalidParam(where, part, "a part with a text, like {'type': 'text', 'text': 'Hello'}")
    return {"type": "text", "text": texts[0] or texts[-1]}


def _calls(where: str, calls: object) -> list[Mapping[str, Any]]:
    if not is_list(calls):
        raise InvalidParam(where, calls, "a list of calls")
    several: list[Any] = list(calls)  # type: ignore[call-overload]
    for i, call in enumerate(several):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidParam(f"{where}[{i}]", call, "{'function': {'name': ..., 'arguments': ...}}")
    return several


# ------------------------------------------------------------------------------------------------ Python arguments


def is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def as_prompt(where: str, prompt: Mapping[str, Any]) -> str | list[int]:
    """The prompt in {"prompt": TEXT} or {"prompt_token_ids": IDS}. Raises InvalidParam."""
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if others := [name for name in prompt if name not in ("prompt", "prompt_token_ids") and prompt[name] is not None]:
        raise InvalidParam(f"{where}.{others[0]}", prompt[others[0]], f"left out: a prompt here is {PROMPT}")
    if is_list(ids) and ids and all(isinstance(t, int) for t in ids):
        return list(ids)  # a text beside them is what they were made of
    if isinstance(text, str) and ids is None:
        return text
    raise InvalidParam(where, prompt, "{'prompt': TEXT} or {'prompt_token_ids': [ID, ...]}")


def as_prompts(prompts: Prompts) -> list[Prompt]:
    """A single text, list of ids or dict is one prompt. Raises InvalidParam."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        return [as_prompt("prompt", prompts)]
    if not is_list(prompts):
        raise InvalidParam("prompts", prompts, f"{PROMPT}, or several of them")
    several: list[Any] = list(prompts)
    if several and all(isinstance(p, int) for p in several):
        return [several]
    for i, prompt in enumerate(several):
        if isinstance(prompt, Mapping):
            several[i] = as_prompt(f"prompts[{i}]", prompt)
        elif not isinstance(prompt, str) and not (is_list(prompt) and all(isinstance(t, int) for t in prompt)):
            raise InvalidParam(f"prompts[{i}]", prompt, PROMPT)
    return several


def as_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """A single conversation is a list of one. Raises InvalidParam."""
    if not is_list(messages) or not messages:
        raise InvalidParam("messages", messages, MESSAGES)
    several: list[Any] = [messages] if isinstance(messages[0], Mapping) else list(messages)
    for conversation in several:
        if not is_list(conversation) or not conversation:
            raise InvalidParam("messages", conversation, MESSAGES)
    return several


def as_choice(choice: str | ToolChoice) -> ToolChoice:
    """Raises InvalidParam."""
    if isinstance(choice, ToolChoice):
        return choice
    if choice not in ("auto", "none", "required"):
        raise InvalidParam("tool_choice", choice, "'auto', 'none', 'required' or a ToolChoice")
    return ToolChoice(choice)  # type: ignore[arg-type]


Params = SamplingParams | Sequence[SamplingParams] | None
Adapters = str | Sequence[str | None] | None


def _with_each(prompts: Sequence[T], params: Params, adapter: Adapters) -> Iterator[tuple[T, SamplingParams, Any]]:
    """Each prompt with its params and its adapter: one for all, or one for each. Raises InvalidParam."""
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    if adapter is None or isinstance(adapter, str):
        adapter = [adapter] * len(prompts)
    if not is_list(params) or not all(isinstance(one, SamplingParams) for one in params):
        raise InvalidParam("params", params, "SamplingParams, or a list of them")
    for name, given in (("params", params), ("adapter", adapter)):
        if len(given) != len(prompts):
            raise InvalidParam(name, len(given), f"one for all, or one per prompt ({len(prompts)})")
    return zip(prompts, params, adapter, strict=True)


def text_asks(
    prompts: Prompts, params: Params = None, n: int = 1, adapter: Adapters = None,
    beams: Beams | None = None,
) -> list[TextAsk]:  # fmt: skip
    """The asks of `LLM.generate`, one per prompt."""
    each = _with_each(as_prompts(prompts), params, adapter)
    return [TextAsk(prompts=[prompt], adapter=name, beams=beams, **_of_params(one, n)) for prompt, one, name in each]


def _of_params(params: SamplingParams, n: int) -> dict[str, Any]:
    """The fields of an ask that SamplingParams carries and the engine does not read. Raises InvalidParam."""
    if n != 1 and params.n not in (1, n):
        raise InvalidParam("n", n, f"the n of its params ({params.n}), or to be said once")
    return {
        "params": params, "n": n if n != 1 or isinstance(n, bool) else params.n, "priority": params.priority,
        "include_stop": params.include_stop_str_in_output, "skip_special": params.skip_special_tokens,
        "last": params.truncate_prompt_tokens,
    }  # fmt: skip


def one_text_ask(prompt: PromptInput, params: SamplingParams | None = None) -> list[TextAsk]:
    """The ask of `LLM.stream`. Raises InvalidParam for several prompts."""
    asks = text_asks(prompt, params)
    if len(asks) != 1:
        raise InvalidParam("prompt", prompt, PROMPT)
    return asks


def chat_asks(
    messages: Messages | Sequence[Messages],
    params: Params = None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    n: int = 1,
    tool_choice: str | ToolChoice = "auto",
    adapter: Adapters = None,
    template_options: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
) -> list[ChatAsk]:
    """The asks of `LLM.chat`, one per conversation."""
    each = _with_each(as_conversations(messages), params, adapter)
    choice = as_choice(tool_choice)
    return [
        ChatAsk(
            messages=conversation, tools=tools, tool_choice=choice, adapter=name, **_of_params(one, n),
            template_options=template_options or {}, add_generation_prompt=not continue_final_message,
            continue_final=continue_final_message,
        )
        for conversation, one, name in each
    ]  # fmt: skip
