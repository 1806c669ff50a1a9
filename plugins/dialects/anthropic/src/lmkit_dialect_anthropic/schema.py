"""Requests of the Messages API: bounded; what is accepted is honoured, the rest refused or named as dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from lmkit.api import MAX_STOP, MAX_TOKENS
from lmkit_http.strict import (
    MAX_MESSAGES,
    MAX_TOOLS,
    NUMBER,
    Arguments,
    Content,
    Echoed,
    Json,
    Label,
    Name,
    Open,
    OutputTokens,
    Refused,
    Strict,
)
from pydantic import Field

MAX_BLOCKS = 4096

# fields that change nothing here
DROPPABLE: Mapping[str, tuple[Any, ...]] = {
    "metadata": (), "service_tier": (), "context_management": (), "inference_geo": (), "speed": (), "betas": (),
    "cache_control": (),  # prompts are looked up in the prefix cache in any case
}  # fmt: skip
# fields that cannot be honoured
REFUSED: Mapping[str, Refused] = {
    "container": Refused("leave it out: there are no containers here"),
    "mcp_servers": Refused("connect to them yourself, and send their tools as tools"),
    "max_tokens_to_sample": Refused("send max_tokens"),
    "prompt": Refused("send messages"),
    "stop": Refused("send stop_sequences"),
}


class Block(Echoed):
    """A part of a message; `type` says which of the other fields it has."""

    type: Annotated[str, Field(min_length=1, max_length=64)]
    text: Content | None = None
    thinking: Content | None = None
    signature: Content | None = None
    data: Content | None = None  # of reasoning that only its author can read
    id: Label | None = None
    name: Name | None = None
    input: Arguments = ""
    tool_use_id: Label | None = None
    content: Content | Annotated[list[Block], Field(fail_fast=True, max_length=MAX_BLOCKS)] | Json | None = None
    is_error: bool | None = None


Blocks = Annotated[list[Block], Field(fail_fast=True, max_length=MAX_BLOCKS)]


class Message(Echoed):
    role: Literal["user", "assistant", "system"]
    content: Content | Blocks


class Tool(Echoed):
    type: Annotated[str, Field(max_length=64)] | None = None
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: Content | None = None
    input_schema: Json | None = None


class ToolChoice(Echoed):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Echoed):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS), NUMBER] | None = None


class Format(Strict):
    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(Strict):
    format: Format | None = None
    effort: Annotated[str, Field(max_length=32)] | None = None


class CountRequest(Open):
    """What both routes read: a conversation."""

    refused: ClassVar[Mapping[str, Refused]] = REFUSED
    droppable: ClassVar[Mapping[str, tuple[Any, ...]]] = DROPPABLE
    model: Annotated[str, Field(max_length=512)] | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system: Content | Blocks | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None  # as it was called before it was a part of output_config

    @property
    def format(self) -> Format | None:
        return (self.output_config and self.output_config.format) or self.output_format

    @property
    def thinks(self) -> bool:
        return self.thinking is not None and self.thinking.type != "disabled"


class MessagesRequest(CountRequest):
    max_tokens: OutputTokens
    stop_sequences: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(fail_fast=True, max_length=MAX_STOP)
    ] | None = None  # fmt: skip
    stop_in: Literal["content", "output"] | None = None  # output: stop_sequences are also about reasoning and calls
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2), NUMBER] | None = None
    top_p: Annotated[float, Field(ge=0, le=1), NUMBER] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 31), NUMBER] | None = None
