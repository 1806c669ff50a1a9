"""Requests of the Responses API: bounded; what is accepted is honoured, the rest refused or named as dropped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from lmkit.api import MAX_LOGPROBS, Grammar
from lmkit_formats import closed
from lmkit_http import strict
from lmkit_http.dialect import UnsupportedField
from lmkit_http.strict import (
    MAX_MESSAGES,
    MAX_TOOLS,
    NUMBER,
    Content,
    Echoed,
    InvalidBody,
    Json,
    Label,
    Open,
    OutputTokens,
    Refused,
    Strict,
)
from pydantic import BeforeValidator, Field, JsonValue

MAX_PARTS = 4096

# fields that change nothing here, with the values that need not be mentioned
DROPPABLE: Mapping[str, tuple[Any, ...]] = {
    "user": (), "safety_identifier": (), "prompt_cache_key": (), "service_tier": ("auto", "default"),
    "prompt_cache_retention": ("in_memory",), "prompt_cache_options": (),
}  # fmt: skip

REFUSED: Mapping[str, Refused] = {
    "background_options": Refused("leave it out, and ask for the answer by its id"),
    "conversation": Refused("send previous_response_id, or the items themselves"),
    "prompt": Refused("write the prompt into instructions and input"),
    "context_management": Refused('send "truncation": "auto", or fewer items'),
    "moderation": Refused("leave it out: nothing is moderated here"),
    "image": Refused("leave it out: models here read text alone"),
    "access_programs": Refused("leave it out"),
    "messages": Refused("send input, or use /v1/chat/completions"),
    "max_tokens": Refused("send max_output_tokens"),
    "max_completion_tokens": Refused("send max_output_tokens"),
    "response_format": Refused("send text.format"),
    "reasoning_effort": Refused("send reasoning.effort"),
    "n": Refused("send the request several times", (1,)),
    "stop": Refused("use /v1/chat/completions: this API knows no stop texts"),
}


class Part(strict.Part):
    """A part of a message, of reasoning, or of what a tool answered."""

    # what clients send back from an answer; nothing to honour in it
    annotations: Annotated[list[JsonValue], Field(fail_fast=True, max_length=1024)] | None = None
    logprobs: Annotated[list[JsonValue], Field(fail_fast=True)] | None = None


Parts = Annotated[list[Part], Field(fail_fast=True, max_length=MAX_PARTS)]


Results = Annotated[list[Json], Field(fail_fast=True, max_length=MAX_PARTS)]  # of commands


def _text(value: Any) -> Any:
    """Arguments as a text, also where an item has them as an object; None: it has none."""
    return None if value is None else strict.as_arguments(value)


class Item(Echoed):
    """One step of a conversation; `type` says which of the other fields it has."""

    type: Annotated[str, Field(max_length=64)] | None = None  # None: a message, or a reference where there is no role
    id: Label | None = None
    status: Label | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | Parts | None = None
    phase: Label | None = None
    summary: Parts | None = None
    encrypted_content: Content | None = None
    call_id: Label | None = None
    name: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    arguments: Annotated[Content | None, BeforeValidator(_text)] = None
    namespace: Label | None = None
    input: Content | None = None  # of a custom tool
    execution: Label | None = None  # who searches for tools
    action: Json | None = None  # of a shell
    operation: Json | None = None  # on a file
    output: Annotated[Content | Parts | Results | None, Field(union_mode="left_to_right")] = None
    # of what was done with an MCP server
    server_label: Label | None = None
    error: Content | Json | None = None
    tools: Annotated[list[JsonValue], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None

    @property
    def kind(self) -> str:
        return self.type or ("message" if self.role is not None else "item_reference")


Items = Annotated[list[Item], Field(fail_fast=True, max_length=MAX_MESSAGES)]


ToolNames = Annotated[list[Annotated[str, Field(max_length=128)]], Field(max_length=MAX_TOOLS)]


class ToolFilter(Strict):
    tool_names: ToolNames | None = None
    read_only: bool | None = None


class Approval(Strict):
    always: ToolFilter | None = None
    never: ToolFilter | None = None


class Tool(Echoed):
    """A function, a custom tool, a namespace of these, a search for tools, or the tools of an MCP server; any other
    type is a tool that some service would run."""

    type: Annotated[str, Field(max_length=64)]
    name: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    description: Content | None = None
    parameters: Json | None = None
    strict: bool | None = None
    format: Json | None = None  # of the input of a custom tool
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None  # of a namespace
    execution: Label | None = None  # who searches for tools
    # of a server
    server_label: Label | None = None
    server_url: Annotated[str, Field(max_length=2048)] | None = None
    server_description: Content | None = None
    connector_id: Label | None = None
    allowed_tools: ToolNames | ToolFilter | None = None
    require_approval: Literal["always", "never"] | Approval | None = None
    headers: Json | None = None
    authorization: Content | None = None

    @property
    def allowed_names(self) -> list[str] | None:
        """The tools of the server that may be used; None: all."""
        return self.allowed_tools.tool_names if isinstance(self.allowed_tools, ToolFilter) else self.allowed_tools


class NamedTool(Echoed):
    """A tool that is to be called, or those that may be."""

    type: Annotated[str, Field(max_length=64)]
    name: Annotated[str, Field(max_length=128)] | None = None
    namespace: Label | None = None
    server_label: Label | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None


class Reasoning(Strict):
    effort: Annotated[str, Field(max_length=32)] | None = None
    summary: Label | None = None
    generate_summary: Label | None = None
    context: Label | None = None
    mode: Label | None = None


class Format(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: Label | None = None
    description: Content | None = None
    schema_: Json | None = Field(None, alias="schema")
    strict: bool | None = None  # it is always kept to the letter


class Text(Strict):
    format: Format | None = None
    verbosity: Label | None = None


class StreamOptions(Strict):
    droppable: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": ()}  # answers are not padded


class CountRequest(Open):
    """What both routes read: a conversation."""

    refused: ClassVar[Mapping[str, Refused]] = REFUSED
    model: Annotated[str, Field(max_length=512)] | None = None
    input: Content | Items | None = None
    instructions: Content | None = None
    previous_response_id: Label | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: Text | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # an extension
    chat_template_kwargs: Annotated[Json, Field(max_length=64)] | None = None

    def check(self) -> None:
        """What the types cannot say, and the names of what changes nothing. Raises RequestError."""
        thought = self.reasoning or Reasoning()
        for name in ("summary", "generate_summary", "context", "mode"):
            if getattr(thought, name) not in (None, "auto", "standard") or (name == "summary" and thought.summary):
                self.dropped.add(f"reasoning.{name}")
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            self.dropped.add("text.verbosity")

    def items(self) -> list[Item]:
        """The input, of which a text is one message."""
        if isinstance(self.input, str):
            return [Item(type="message", role="user", content=self.input)]
        return self.input or []

    @property
    def grammar(self) -> Grammar | None:
        """The constraint on the text of the answer. Raises RequestError."""
        form = self.text.format if self.text is not None else None
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return Grammar("json_object", "")
        if form.schema_ is None:
            raise InvalidBody("text.format.schema is required", "text.format.schema")
        return Grammar("json_schema", json.dumps(closed(form.schema_), ensure_ascii=False))


class ResponsesRequest(CountRequest):
    droppable: ClassVar[Mapping[str, tuple[Any, ...]]] = DROPPABLE
    max_output_tokens: OutputTokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2), NUMBER] | None = None
    top_p: Annotated[float, Field(ge=0, le=1), NUMBER] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), NUMBER] | None = None
    include: Annotated[
        list[Literal[
            "reasoning.encrypted_content", "message.output_text.logprobs", "message.input_image.image_url",
            "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
            "computer_call_output.output.image_url", "code_interpreter_call.outputs",
        ]],
        Field(max_length=64),
    ] | None = None  # fmt: skip
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], Label], Field(max_length=16)] | None = None
    max_tool_calls: Annotated[int, Field(ge=0, le=1 << 31), NUMBER] | None = None  # of tools of MCP servers
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # labels that change nothing in the answer
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None
    prompt_cache_options: Json | None = None
    service_tier: Label | None = None
    # extensions, named as in /v1/chat/completions
    seed: Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1), NUMBER] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 31), NUMBER] | None = None
    min_p: Annotated[float, Field(ge=0, le=1), NUMBER] | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), le=1 << 31), NUMBER] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None

    def check(self) -> None:
        """Names what is accepted and changes nothing. Raises RequestError."""
        super().check()
        if self.background:
            self._check_background()

    def _check_background(self) -> None:
        if self.stream:
            raise UnsupportedField(
                "stream",
                "an answer in the background is not streamed",
                fix="leave stream out, and ask for it by its id",
            )
        if self.store is False:
            raise UnsupportedField("store", "an answer in the background is kept until it is read", fix="leave it out")
        if self.priority:
            self.dropped.add("priority")  # it is behind all others

    @property
    def logprobs(self) -> int | None:
        """How many likely tokens are shown beside each of the answer; None: not even those of the answer."""
        if self.top_logprobs is None and "message.output_text.logprobs" not in (self.include or ()):
            return None
        return self.top_logprobs or 0

    @property
    def sealed(self) -> bool:
        """Whether reasoning comes in one field that clients send back unread, too."""
        return "reasoning.encrypted_content" in (self.include or ())
