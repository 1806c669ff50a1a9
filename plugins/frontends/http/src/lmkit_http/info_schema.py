"""Requests of the routes that generate nothing."""

from __future__ import annotations

from typing import Annotated, ClassVar

from lmkit.api import MAX_TOKENS
from pydantic import Field

from lmkit_http.strict import MAX_IDS, MAX_MESSAGES, MAX_TOOLS, NUMBER, Content, Json, Message, Strict, TokenId, Tool

MAX_STEPS = 1000  # that are recorded in one go


class ProfileRequest(Strict):
    """As vLLM names them."""

    profile_prefix: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")] = "steps"
    max_iterations: Annotated[int, Field(ge=1, le=MAX_STEPS), NUMBER] = 100


class LoadAdapterRequest(Strict):
    lora_name: Annotated[str, Field(min_length=1, max_length=128)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadAdapterRequest(Strict):
    lora_name: Annotated[str, Field(min_length=1, max_length=128)]


class UpdateWeightsRequest(Strict):
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    partial: bool = False


class TokenizeRequest(Strict):
    """What is to be tokenized: text (`prompt`) or messages."""

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
