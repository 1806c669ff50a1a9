"""Requests with token ids: the fields of sampling are those of the OpenAI dialect, in an object of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from lmkit.api import MAX_LOGPROBS
from lmkit_dialect_openai.fields import REFUSED
from lmkit_dialect_openai.schema import Sampling, StreamOptions
from lmkit_http.dialect import UnsupportedField
from lmkit_http.strict import MAX_IDS, NUMBER, Ids, Label, Open, Refused
from pydantic import Field

_ABOVE = (
    "model",
    "stream",
    "stream_options",
    "priority",
    "cache_salt",
    "request_id",
)  # of the request
# fields of Sampling that are no sampling parameters
_NO_PARAMS = {name: Refused(f"send {name} beside sampling_params", unless_empty=False) for name in _ABOVE} | {
    name: Refused("leave it out", unless_empty=False) for name in ("truncate_prompt_tokens", "resume")
}
_ELSEWHERE = Refused("leave it out: each server has a cache of its own")
_BY_CONTENT = Refused("leave it out: engines find blocks of each other by what is in them (--kv-connector)")
# what sampling parameters say in a rendered prompt: not what is said above them, nor what only a prompt can mean
_RENDERED = frozenset(Sampling.model_fields) - {*_ABOVE, "user", "session_id", "truncate_prompt_tokens",
    "truncation_side", "return_token_ids", "return_tokens_as_token_ids", "response_format", "structured_outputs",
    "resume", "max_tokens"}  # fmt: skip


class Params(Sampling):
    refused: ClassVar[Mapping[str, Refused]] = {
        **REFUSED, **_NO_PARAMS,
        "detokenize": Refused("leave it out: answers are token ids", (True,)),
        "output_kind": Refused("send stream"), "skip_clone": Refused("leave it out"),
        "flat_logprobs": Refused("leave it out"), "extra_args": Refused("send vllm_xargs"),
        "prompt_logprob_start": Refused("leave it out: all of the prompt is scored", (0,)),
    }  # fmt: skip
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), NUMBER] | None = None


class GenerateRequest(Open):
    max_values: ClassVar[int] = MAX_IDS
    refused: ClassVar[Mapping[str, Refused]] = {
        "kv_transfer_params": _BY_CONTENT, "ec_transfer_params": _ELSEWHERE,
        "features": Refused("leave it out: models here read text alone"),
        "content_parts": Refused("leave it out: models here read text alone"),
        "token_offsets": Refused("leave it out"), "reasoning_ended": Refused("leave it out: nothing is parsed here"),
        "reasoning_parser_kwargs": Refused("leave it out: nothing is parsed here"),
        "return_token_ids": Refused("leave it out: answers are token ids", (True,)),
    }  # fmt: skip
    token_ids: Ids
    sampling_params: Params
    model: Annotated[str, Field(max_length=512)] | None = None
    request_id: Label | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), le=1 << 31), NUMBER] | None = None
    output_mode: Literal["tokens"] | None = None

    def check(self) -> None:
        """What the types cannot say. Raises RequestError."""
        params = self.sampling_params
        params.check()
        if params.prompt_logprobs is not None and self.stream:
            raise UnsupportedField("sampling_params.prompt_logprobs", "prompt_logprobs is not available with stream")
        if self.stream_options is not None and not self.stream:
            self.dropped.add("stream_options")
        self.dropped.update(f"sampling_params.{name}" for name in params.dropped)


def sampling_params(request: Sampling) -> dict[str, Any]:
    """What a request of the OpenAI dialect says of sampling, for a GenerateRequest."""
    given = request.model_dump(include=set(_RENDERED), exclude_none=True)
    logprobs = getattr(request, "top_logprobs", None) if isinstance(given.get("logprobs"), bool) else None
    wanted = given.pop("logprobs", None)
    if wanted is True:
        given["logprobs"] = logprobs or 0
    elif wanted is not None and wanted is not False:
        given["logprobs"] = wanted
    return given
