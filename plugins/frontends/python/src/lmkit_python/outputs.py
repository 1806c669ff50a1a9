"""What `LLM` and `AsyncLLM` give back for a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmkit.api import ErrorInfo, FinishReason, TokenLogprob

from lmkit_python.front.message import ToolCall
from lmkit_python.front.vectors import vector_of

if TYPE_CHECKING:
    from lmkit_python.front.prepare import Turn
    from lmkit_python.front.vectors import Vector


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

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the log-probabilities of its tokens, when params.logprobs is given."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass(slots=True)
class RequestOutput:
    """All outputs of one prompt. The properties are those of the first output."""

    prompt: str | None  # None when token ids were given
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprob] | None = None  # positions 1.. of the prompt, when asked for
    num_cached: int = 0  # prompt tokens found in the prefix cache
    request_id: str = ""  # of LLMEngine

    @property
    def finished(self) -> bool:
        return all(one.finish_reason is not None for one in self.outputs)

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


@dataclass(slots=True)
class PoolingOutput:
    """The answer to one prompt: an embedding, scores of classes, or one of these per token."""

    prompt: str | None
    prompt_token_ids: list[int]
    data: Vector


def pooling_output(turn: Turn) -> PoolingOutput:
    """The answer of a turn that has finished. Raises EngineBusy when there is none."""
    return PoolingOutput(turn.prompt, turn.request.token_ids, vector_of(turn))


def outputs_of(groups: Sequence[Sequence[Turn]]) -> list[RequestOutput]:
    """One for each ask, all of whose turns have finished."""
    return [output_of(group) for group in groups]


def output_of(turns: Sequence[Turn]) -> RequestOutput:
    """The answers to one prompt, as far as they have come."""
    first = turns[0]
    prompt_logprobs = first.stream.prompt_logprobs if first.request.params.prompt_logprobs is not None else None
    return RequestOutput(
        first.prompt,
        first.request.token_ids,
        [_completion(turn) for turn in turns],
        prompt_logprobs,
        max(turn.stream.usage.cached_tokens for turn in turns),
    )


def _completion(turn: Turn) -> Completion:
    message, stream = turn.message, turn.stream
    finish = message.finish
    logprobs = stream.logprobs[: len(stream.token_ids)] if turn.request.params.logprobs is not None else None
    return Completion(
        turn.index,
        message.content,
        list(stream.token_ids),
        finish.reason if finish else None,
        finish.stop if finish else None,
        logprobs,
        message.reasoning,
        message.calls,
        finish.error if finish else None,
    )


__all__ = [
    "Completion", "PoolingOutput", "RequestOutput", "ToolCall", "output_of", "outputs_of", "pooling_output",
]  # fmt: skip
