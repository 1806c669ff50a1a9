"""Beam search: what `LLM.beam_search` is asked and what it gives back, under the names that vLLM has for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lmkit.api import Beams, FinishReason, InvalidParam, SamplingParams, Tokenizer, TokenLogprob

from lmkit_python.front.ask import Adapters, Prompts, TextAsk, text_asks
from lmkit_python.front.run import check_finish
from lmkit_python.outputs import output_of

if TYPE_CHECKING:
    from lmkit_python.front.prepare import Turn


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How to search. Raises InvalidParam on construction.

    Beams are ranked by the sum of their tokens' log-probabilities / length ** `length_penalty`, as the model scores
    them: `temperature` is 0 or 1. `early_stopping`: True: the search ends with the first `beam_width` outputs that are
    complete; False: when the likeliest one under way would not be better if it ended now; "never": when it could not be
    better at any length.
    """

    beam_width: int
    max_tokens: int | None = None  # None: as many as fit
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop_token_ids: Sequence[int] = ()
    logprobs: int = 0  # alternatives told beside each token

    def __post_init__(self) -> None:
        if self.temperature not in (0.0, 1.0):
            raise InvalidParam("temperature", self.temperature, "0 or 1: beams are ranked as the model scores them")
        self.beams()
        self.sampling()

    def beams(self) -> Beams:
        return Beams(self.beam_width, self.beam_width, self.length_penalty, self.early_stopping)

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens, temperature=0.0, ignore_eos=self.ignore_eos, logprobs=self.logprobs,
            stop_token_ids=tuple(self.stop_token_ids),
        )  # fmt: skip


@dataclass(slots=True)
class BeamSearchSequence:
    """One of the best outputs; `tokens` and `text` begin with the prompt."""

    tokens: list[int]
    text: str
    logprobs: list[TokenLogprob]  # of the output
    cum_logprob: float
    score: float  # by which it is ranked: `cum_logprob` with the length penalty
    finish_reason: FinishReason | None
    stop_reason: int | str | None  # the token that ended it


@dataclass(slots=True)
class BeamSearchOutput:
    """What was found for a prompt, best first."""

    sequences: list[BeamSearchSequence]


def beam_asks(prompts: Prompts, params: BeamSearchParams, adapter: Adapters) -> list[TextAsk]:
    """The asks of `LLM.beam_search`, one per prompt. Raises InvalidParam."""
    if not isinstance(params, BeamSearchParams):
        raise InvalidParam("params", params, "BeamSearchParams")
    return text_asks(prompts, params.sampling(), params.beam_width, adapter, params.beams())


def beam_output(turns: Sequence[Turn], params: BeamSearchParams, tokenizer: Tokenizer) -> BeamSearchOutput:
    """What the turns of a prompt, which have finished, have found. Raises the error of one that failed."""
    for turn in turns:
        check_finish(turn)
    output = output_of(turns)
    prompt = tokenizer.decode(output.prompt_token_ids) if output.prompt is None else output.prompt
    found = []
    for one in output.outputs:
        total = one.cumulative_logprob or 0.0
        found.append(
            BeamSearchSequence(
                [*output.prompt_token_ids, *one.token_ids], prompt + one.text, one.logprobs or [], total,
                total / max(1, len(one.token_ids)) ** params.length_penalty, one.finish_reason, one.stop,
            )
        )  # fmt: skip
    return BeamSearchOutput(found)
