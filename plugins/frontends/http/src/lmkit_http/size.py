"""The size of an answer, as far as it is known before anything of it is computed.

A request of a few bytes may ask for millions of log-probabilities: every field is within its own bound, their product
is not. So the product is counted for each answer, whichever dialect asked, when its prompts are tokens and before the
engine has seen them. What a client left open is cut to what fits, as max_tokens is cut at the end of the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lmkit.api import RequestError
from lmkit_python.front.ask import GenerateAsk

if TYPE_CHECKING:
    from lmkit.engine.messages import EngineFacts
    from lmkit_python.front.ask import Ask
    from lmkit_python.front.prepare import Turn

MAX_LOGPROBS_SHOWN = 1 << 20  # log-probabilities of one answer, of its prompts and outputs together
MAX_NUMBERS = 1 << 23  # numbers of one answer: 2,048 embeddings of 4,096 components
ENTRY_BYTES = 240  # of memory, for a log-probability that is held and then written as JSON
NUMBER_BYTES = 24  # of memory, for a number of a vector, likewise


class AnswerTooLarge(RequestError):
    """The answer to a request would have more log-probabilities or numbers than one answer may have."""

    code = "answer-too-large"

    def __init__(self, message: str, *, fix: str, field: str) -> None:
        super().__init__(message, fix=fix)
        self.field = field


def bound_answer(ask: Ask, turns: Sequence[Turn], facts: EngineFacts) -> int:
    """Bytes of memory that the known part of an answer takes: log-probabilities of prompts, and vectors.

    Shortens outputs whose length the client left open. Raises AnswerTooLarge.
    """
    if not isinstance(ask, GenerateAsk):
        return NUMBER_BYTES * _check_vectors(turns, facts)
    prompts = sum(_num_scored(turn) * (1 + (turn.request.params.prompt_logprobs or 0)) for turn in turns)
    if prompts > MAX_LOGPROBS_SHOWN:
        tokens, top = max(map(_num_scored, turns)), max(turn.request.params.prompt_logprobs or 0 for turn in turns)
        raise AnswerTooLarge(
            f"{len(turns)} answers (prompts x n) with up to {tokens} prompt tokens and {1 + top} log-probabilities for "
            f"each of them have {prompts} log-probabilities; one answer may have {MAX_LOGPROBS_SHOWN}",
            fix="send fewer prompts at once, or lower n, logprobs or prompt_logprobs", field="logprobs",
        )  # fmt: skip
    shown = [turn for turn in turns if turn.request.params.logprobs is not None]
    outputs = sum(_num_drawn(turn) * (1 + (turn.request.params.logprobs or 0)) for turn in shown)
    if prompts + outputs > MAX_LOGPROBS_SHOWN:
        each = (MAX_LOGPROBS_SHOWN - prompts) // sum(1 + (turn.request.params.logprobs or 0) for turn in shown)
        if ask.params.max_tokens is not None or each < max(1, ask.params.min_tokens):
            tokens, top = max(map(_num_drawn, shown)), max(turn.request.params.logprobs or 0 for turn in shown)
            raise AnswerTooLarge(
                f"{len(shown)} answers (prompts x n) with max_tokens={tokens} and {1 + top} log-probabilities for each "
                f"token have {prompts + outputs} log-probabilities; one answer may have {MAX_LOGPROBS_SHOWN}",
                fix="lower max_tokens, n or logprobs, or send fewer prompts at once", field="logprobs",
            )  # fmt: skip
        for turn in shown:
            _shorten(turn, each)
    return ENTRY_BYTES * prompts


def _num_scored(turn: Turn) -> int:
    return len(turn.request.token_ids) if turn.request.params.prompt_logprobs is not None else 0


def _num_drawn(turn: Turn) -> int:
    return turn.request.params.max_tokens or 0


def _shorten(turn: Turn, max_tokens: int) -> None:
    params = turn.request.params
    if (params.max_tokens or 0) > max_tokens:
        turn.request.params = turn.stream.params = replace(params, max_tokens=max_tokens)


def _check_vectors(turns: Sequence[Turn], facts: EngineFacts) -> int:
    """How many numbers the vectors have. Raises AnswerTooLarge."""
    size = facts.pooler.size if facts.pooler is not None else 0
    num = 0
    for turn in turns:
        pooling = turn.request.pooling
        if pooling is not None:
            rows = len(turn.request.token_ids) if pooling.task.startswith("token_") else 1
            num += rows * min(size, pooling.dimensions or size)
    if num > MAX_NUMBERS:
        raise AnswerTooLarge(
            f"{len(turns)} inputs have {num} numbers in their vectors; one answer may have {MAX_NUMBERS}",
            fix="send fewer or shorter inputs at once, or ask for fewer dimensions", field="input",
        )  # fmt: skip
    return num
