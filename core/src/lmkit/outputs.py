"""What `LLM` gives back for a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmkit.api import ErrorInfo, FinishReason, TokenLogprob


@dataclass(slots=True)
class ToolCall:
    """`arguments` is the JSON text that the model wrote."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Completion:
    """One output of one prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | int | None = None  # the stop string or stop token id that ended it
    logprobs: list[TokenLogprob] | None = None  # one per token, when params.logprobs is given
    reasoning: str = ""  # chat only: what stood between the model's thinking tags
    tool_calls: list[ToolCall] = field(default_factory=list)  # chat only
    error: ErrorInfo | None = None  # with finish_reason "error"


@dataclass(slots=True)
class RequestOutput:
    """All outputs of one prompt. The properties are those of the first output."""

    prompt: str | None  # None when token ids were given
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprob] | None = None  # positions 1.. of the prompt, when asked for
    num_cached: int = 0  # prompt tokens found in the prefix cache

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.outputs[0].logprobs

    @property
    def tool_calls(self) -> list[ToolCall]:
        return self.outputs[0].tool_calls

    @property
    def reasoning(self) -> str:
        return self.outputs[0].reasoning
