"""Hypothesis strategies for what enters an engine."""

from __future__ import annotations

from hypothesis import strategies as st
from lmkit.api import EngineRequest, SamplingParams


@st.composite
def sampling_params(draw: st.DrawFn, vocab_size: int = 97, max_tokens: int = 16) -> SamplingParams:
    """Valid parameters, all fields in use; every value within its limits."""
    limit = draw(st.integers(1, max_tokens))
    token = st.integers(0, vocab_size - 1)
    return SamplingParams(
        max_tokens=limit,
        min_tokens=draw(st.integers(0, limit)),
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.7])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.1])),
        top_k=draw(st.sampled_from([0, 1, 5])),
        min_p=draw(st.sampled_from([0.0, 0.05])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.2])),
        seed=draw(st.none() | st.integers(0, 1 << 32)),
        stop_token_ids=tuple(draw(st.lists(token, max_size=3, unique=True))),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.none() | st.integers(0, 3)),
        prompt_logprobs=draw(st.none() | st.integers(0, 2)),
        logit_bias=tuple(draw(st.dictionaries(token, st.floats(-10, 10), max_size=2)).items()),
    )


@st.composite
def engine_requests(
    draw: st.DrawFn, rid: str = "0", vocab_size: int = 97, max_prompt: int = 24, max_tokens: int = 16
) -> EngineRequest:
    """A valid request. Few different tokens, so that prompts share prefixes."""
    return EngineRequest(
        rid,
        draw(st.lists(st.integers(0, min(3, vocab_size - 1)), min_size=1, max_size=max_prompt)),
        draw(sampling_params(vocab_size, max_tokens)),
        priority=draw(st.sampled_from([0, 0, 1, -1])),
        arrival=draw(st.floats(0, 100)),
        cache_salt=draw(st.sampled_from([None, None, "tenant"])),
    )
