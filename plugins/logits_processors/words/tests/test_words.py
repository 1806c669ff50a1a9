"""What is banned cannot be drawn, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit import LLM, SamplingParams
from lmkit.api import SampleContext
from lmkit_logits_processor_words.processors import MAX_ALLOWED, MAX_RUN, MAX_RUNS, AllowedTokens, BadWords
from lmkit_testing import LogitsProcessorConformance

VOCAB = 6
tokens = st.integers(0, VOCAB - 1)


class TestAllowedTokens(LogitsProcessorConformance):
    plugin = "logits_processor:allowed_token_ids"
    asked = ({"ids": [1]}, {"ids": [3, 3, 63, 9999]})
    refused = (
        {"ids": []},
        {"ids": 3},
        {"ids": [-1]},
        {"ids": ["1"]},
        {"ids": [True]},
        {},
        {"ids": [1] * (MAX_ALLOWED + 1)},
    )


class TestBadWords(LogitsProcessorConformance):
    plugin = "logits_processor:bad_words"
    asked = ({"ids": [[3]]}, {"ids": [[2, 1], [7, 7], [9999]]})
    refused = (
        {"ids": []}, {"ids": [3]}, {"ids": [[]]}, {"ids": [[1 << 31]]}, {"ids": [[1]] * (MAX_RUNS + 1)},
        {"ids": [[1] * (MAX_RUN + 1)]}, {"words": ["x"]},
    )  # fmt: skip


def logits_of(processor: AllowedTokens | BadWords, name: str, ids: object, text: list[int]) -> torch.Tensor:
    processor.add(0, SamplingParams(extra={name: {"ids": ids}}), text)
    logits = torch.arange(VOCAB, dtype=torch.float32)[None].clone()
    processor.apply(logits, SampleContext([0], [len(text)], lambda row: text))
    return logits[0]


@settings(deadline=None)
@given(ids=st.lists(tokens, min_size=1), text=st.lists(tokens, max_size=5))
def test_only_what_is_allowed_is_left(ids: list[int], text: list[int]) -> None:
    found = logits_of(AllowedTokens(), "allowed_token_ids", ids, text)
    for token in range(VOCAB):
        assert found[token] == (token if token in ids else -torch.inf)


@settings(deadline=None)
@given(
    runs=st.lists(st.lists(tokens, min_size=1, max_size=3), min_size=1, max_size=6), text=st.lists(tokens, max_size=6)
)
def test_a_token_is_banned_exactly_where_it_would_end_a_run(runs: list[list[int]], text: list[int]) -> None:
    found = logits_of(BadWords(), "bad_words", runs, text)
    for token in range(VOCAB):
        longer = [*text, token]
        ends = any(longer[-len(run) :] == run for run in runs)
        assert found[token] == (-torch.inf if ends else token)


@pytest.mark.parametrize("proposer", ["none", "ngram"])
def test_a_model_does_without(proposer: str) -> None:
    """Drawn at random, and with guesses: the word never comes; and from three tokens nothing else is made."""
    if proposer == "ngram":
        pytest.importorskip("lmkit_proposer_ngram", reason="the proposer is not installed")
    prompt = "1 2 3 1 2 4 1 2"
    with LLM("demo", proposer=proposer) as llm:
        options = {"max_tokens": 40, "temperature": 1.0, "seed": 2, "ignore_eos": True}
        (free,) = llm.generate(prompt, SamplingParams(**options))
        often = max(set(free.token_ids), key=free.token_ids.count)
        pair = free.token_ids[3:5]
        bad = {"bad_words": {"ids": [[often], pair]}}
        found = llm.generate(prompt, SamplingParams(**options, extra=bad))[0].token_ids
        assert often not in found
        assert pair not in [found[i : i + 2] for i in range(len(found))]
        few = sorted(set(free.token_ids))[:3]
        allowed = {"allowed_token_ids": {"ids": few}}
        assert set(llm.generate(prompt, SamplingParams(**options, extra=allowed))[0].token_ids) <= set(few)
