"""Penalties against a reference written out token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit import LLM, SamplingParams
from lmkit.api import SampleContext
from lmkit_logits_processor_dry.processor import LONGEST, Dry, repeats
from lmkit_testing import LogitsProcessorConformance


class TestDry(LogitsProcessorConformance):
    plugin = "logits_processor:dry"
    asked = ({}, {"multiplier": 0.0}, {"multiplier": 2, "base": 1.5, "allowed_length": 1, "breakers": [3]})
    refused = (
        {"multiplier": -1}, {"multiplier": float("nan")}, {"base": 0.5}, {"allowed_length": 0}, {"breakers": 3},
        {"allowed_length": 2.0}, {"breakers": [-1]}, {"breakers": [1] * 257}, {"length": 1}, {"multiplier": True},
    )  # fmt: skip


def by_the_book(text: list[int], breakers: list[int]) -> dict[int, int]:
    """For each token that followed what the text ends with: the longest run that both ends share."""
    found: dict[int, int] = {}
    for end in range(len(text) - 1):
        n = 0
        while n <= end and n < LONGEST and text[end - n] == text[len(text) - 1 - n] and text[end - n] not in breakers:
            n += 1
        if n:
            found[text[end + 1]] = max(found.get(text[end + 1], 0), n)
    return found


@settings(deadline=None, max_examples=300)
@given(text=st.lists(st.integers(0, 3), max_size=40), breakers=st.lists(st.integers(0, 3), max_size=2))
def test_the_longest_run_counts(text: list[int], breakers: list[int]) -> None:
    ids, lengths = repeats(np.array(text, np.int64), breakers)
    assert dict(zip(ids.tolist(), lengths.tolist(), strict=True)) == by_the_book(text, breakers)


def test_long_runs_are_bounded() -> None:
    _, lengths = repeats(np.array([1] * 500))
    assert lengths.tolist() == [LONGEST]
    dry = Dry()
    dry.add(0, SamplingParams(extra={"dry": {"base": 10, "multiplier": 100}}), [1])
    logits = torch.zeros(1, 4)
    dry.apply(logits, SampleContext([0], [500], lambda row: [1] * 500))
    assert logits[0].tolist() == [0, -1e4, 0, 0]


@pytest.mark.parametrize("proposer", ["none", "ngram"])
def test_a_loop_is_left(proposer: str) -> None:
    if proposer == "ngram":
        pytest.importorskip("lmkit_proposer_ngram", reason="the proposer is not installed")
    prompt = "1 2 3 1 2 4 1 2"
    with LLM("demo", proposer=proposer) as llm:

        def most_said(**extra: object) -> int:
            params = SamplingParams(max_tokens=80, temperature=0, ignore_eos=True, extra=extra)
            found = llm.generate(prompt, params)[0].token_ids
            runs = [tuple(found[i : i + 6]) for i in range(len(found) - 5)]
            return max(runs.count(run) for run in runs)

        assert most_said(dry={"multiplier": 5.0}) < most_said()
