"""Requests of the Ollama API: bounded; what is accepted is honoured, the rest refused or named as dropped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from lmkit.api import (
    MAX_DIMENSIONS,
    MAX_LOGPROBS,
    MAX_STOP,
    MAX_TOKENS,
    MIN_REPETITION,
    Grammar,
    InvalidParam,
    SamplingParams,
)
from lmkit_formats import closed
from lmkit_http.dialect import Served, UnsupportedField
from lmkit_http.strict import (
    MAX_MESSAGES,
    MAX_TOOLS,
    NUMBER,
    Arguments,
    Content,
    Echoed,
    Json,
    Label,
    Message,
    Name,
    Open,
    Refused,
    check_arguments,
)
from lmkit_http.strict import Tool as FunctionTool
from pydantic import Field, JsonValue

MAX_INPUTS = 2048
_SWITCHES = {"reasoning_effort", "enable_thinking", "thinking", "thinking_budget"}  # variables of chat templates
THINKS = ("low", "medium", "high", "max")
_MEDIA = Refused("leave it out: models here read text alone")
# options of how a model is loaded, and of earlier releases: the server was started with what it needs
_LOADING = (
    "num_ctx", "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "vocab_only", "use_mmap", "use_mlock",
    "num_thread", "num_keep", "num_gqa", "embedding_only", "logits_all", "rope_frequency_base", "rope_frequency_scale",
    "flash_attn", "draft_num_predict",
)  # fmt: skip
StopText = Annotated[str, Field(max_length=1024)]


class Options(Open):
    """How to sample. What says how a model is loaded is settled when the server starts: it is dropped, and named."""

    droppable: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **dict.fromkeys(_LOADING, ()), "mirostat_tau": (5.0,), "mirostat_eta": (0.1,),  # mirostat itself is refused
    }  # fmt: skip
    refused: ClassVar[Mapping[str, Refused]] = {
        "mirostat": Refused("send temperature with top_p or min_p", (0,)),
        "tfs_z": Refused("send min_p", (1, 1.0)),
        "typical_p": Refused("send min_p", (1, 1.0)),
        "penalize_newline": Refused("leave it out", (True,)),
    }
    temperature: Annotated[float, Field(ge=0, le=100), NUMBER] | None = None
    top_p: Annotated[float, Field(ge=0, le=1), NUMBER] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 31), NUMBER] | None = None
    min_p: Annotated[float, Field(ge=0, le=1), NUMBER] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1), NUMBER] | None = None
    num_predict: Annotated[int, Field(ge=-2), NUMBER] | None = None  # below 1: as many as fit
    stop: StopText | Annotated[list[StopText], Field(fail_fast=True, max_length=MAX_STOP)] | None = None
    stop_in: Literal["content", "output"] | None = None  # output: `stop` is also about thinking and calls
    repeat_penalty: Annotated[float, Field(ge=MIN_REPETITION, le=100), NUMBER] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=1 << 31), NUMBER] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2), NUMBER] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2), NUMBER] | None = None

    def check(self) -> None:
        """Names what changes nothing."""
        if self.repeat_penalty not in (None, 1.0) and self.repeat_last_n not in (None, 0, -1):
            self.dropped.add("repeat_last_n")  # the penalty counts all tokens, as where no number is sent

    def given(self) -> dict[str, Any]:
        """Fields of SamplingParams, by their names."""
        names = ("temperature", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "stop_in")
        found: dict[str, Any] = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.top_k is not None:
            found["top_k"] = max(self.top_k, 0)
        if self.repeat_penalty is not None and self.repeat_last_n != 0:
            found["repetition_penalty"] = self.repeat_penalty
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if stops := [text for text in stops if text]:
            found["stop"] = stops
        if (self.num_predict or 0) > 0:
            found["max_tokens"] = min(self.num_predict or 0, MAX_TOKENS)
        return found


class Named(Open):
    """A request about a model."""

    model: Annotated[str, Field(max_length=512)] | None = None
    name: Annotated[str, Field(max_length=512)] | None = None  # what older clients call it
    verbose: bool | None = None


class Base(Open):
    droppable: ClassVar[Mapping[str, tuple[Any, ...]]] = {"keep_alive": ()}  # the model stays as long as the server
    model: Annotated[str, Field(min_length=1, max_length=512)]
    options: Options | None = None

    def check(self, served: Served) -> None:
        """What the types cannot say. Raises RequestError."""
        if self.options is not None:
            self.options.check()
            self.dropped.update(f"options.{name}" for name in self.options.dropped)


class Generating(Base):
    stream: bool | None = None
    format: Literal["", "json"] | Json | None = None
    think: bool | Annotated[str, Field(max_length=32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), NUMBER] | None = None

    def check(self, served: Served) -> None:
        super().check(served)
        if self.top_logprobs and not self.logprobs:
            raise UnsupportedField("top_logprobs", "top_logprobs needs logprobs=true")
        if isinstance(self.think, str) and self.think not in THINKS:
            raise InvalidParam("think", self.think, f"true, false or one of {', '.join(THINKS)}")
        if self.think and not served.about["capabilities"]["reasoning"]:
            self.dropped.add("think")

    def effort(self, served: Served) -> str | None:
        """The effort of reasoning; None: as the template says. Without a switch a model thinks untold."""
        able = served.about["capabilities"]
        switches = _SWITCHES & set(able["template_options"])
        if self.think is None or not able["reasoning"] or (self.think is True and not switches):
            return None
        return self.think if isinstance(self.think, str) else "medium" if self.think else "none"

    def params(self, served: Served) -> SamplingParams:
        """Raises RequestError."""
        given = {**served.default_params, **(self.options.given() if self.options is not None else {})}
        if self.format:
            schema = self.format if isinstance(self.format, dict) else None
            text = "" if schema is None else json.dumps(closed(schema), ensure_ascii=False)
            given["grammar"] = Grammar("json_object" if schema is None else "json_schema", text)
        return SamplingParams(logprobs=(self.top_logprobs or 0) if self.logprobs else None, **given)


class CalledFunction(Echoed):
    name: Name
    arguments: Arguments = ""


class Called(Echoed):
    id: Label | None = None
    function: CalledFunction


class Said(Echoed):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Content | None = None
    thinking: Content | None = None
    images: Annotated[list[JsonValue], Field(fail_fast=True, max_length=64)] | None = None
    tool_calls: Annotated[list[Called], Field(fail_fast=True, max_length=1024)] | None = None
    tool_name: Name | None = None
    tool_call_id: Label | None = None

    def message(self, number: int) -> Message:
        """The same in the names of the OpenAI API, which templates read. Raises UnsupportedField."""
        if self.images:
            raise UnsupportedField(f"messages.{number}.images", "this model takes no images", fix="send text alone")
        for i, call in enumerate(self.tool_calls or ()):
            check_arguments(call.function.arguments, f"messages.{number}.tool_calls.{i}.function.arguments")
        calls = [
            {"id": call.id, "type": "function",
             "function": {"name": call.function.name, "arguments": call.function.arguments}}
            for call in self.tool_calls or ()
        ]  # fmt: skip
        return Message.model_validate({
            **(self.model_extra or {}), "role": self.role, "content": self.content or "", "tool_calls": calls or None,
            "reasoning_content": self.thinking or None, "name": self.tool_name, "tool_call_id": self.tool_call_id,
        })  # fmt: skip


class Tool(FunctionTool):
    type: Annotated[str, Field(min_length=1, max_length=64)] = "function"


class ChatRequest(Generating):
    messages: Annotated[list[Said], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None


class GenerateRequest(Generating):
    refused: ClassVar[Mapping[str, Refused]] = {
        "images": _MEDIA, "width": _MEDIA, "height": _MEDIA, "steps": _MEDIA,
        "suffix": Refused("write the model's own tokens for filling in into the prompt, with raw=true"),
        "template": Refused("send raw=true with a prompt that is rendered already"),
        "context": Refused("send the conversation to /api/chat"),
    }  # fmt: skip
    prompt: Content | None = None
    system: Content | None = None
    raw: bool | None = None

    def check(self, served: Served) -> None:
        super().check(served)
        if self.raw and self.system:
            raise UnsupportedField("system", "a raw prompt goes to the model as it is, without a system message")
        if self.raw and self.think:
            self.dropped.add("think")  # a raw prompt goes to the model as it is


class EmbedRequest(Base):
    input: Content | Annotated[list[Content], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS), NUMBER] | None = None


class EmbeddingsRequest(Base):
    prompt: Content
