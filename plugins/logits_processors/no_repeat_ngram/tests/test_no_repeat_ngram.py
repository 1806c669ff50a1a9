"""No run comes twice, against transformers' own processor, and with tokens that are guessed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit import LLM, SamplingParams
from lmkit.api import InvalidParam
from lmkit_logits_processor_no_repeat_ngram.processor import completions
from lmkit_testing import LogitsProcessorConformance


class TestNoRepeatNgram(LogitsProcessorConformance):
    plugin = "logits_processor:no_repeat_ngram"
    asked = ({"size": 1}, {"size": 3}, {"size": 1024})
    refused = ({"size": 0}, {"size": "3"}, {"size": 1025}, {"length": 3}, {})


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 5))
def test_bans_what_transformers_bans(text: list[int], size: int) -> None:
    process = pytest.importorskip("transformers.generation.logits_process").NoRepeatNGramLogitsProcessor(size)
    scores = process(torch.tensor([text]), torch.zeros(1, 4))
    assert completions(np.array(text), size).tolist() == scores[0].isinf().nonzero().flatten().tolist()


@pytest.mark.parametrize("proposer", ["none", "ngram"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_no_run_comes_twice(proposer: str, temperature: float) -> None:
    """Guesses are verified with what is banned after them, so that they change nothing either."""
    if proposer == "ngram":
        pytest.importorskip("lmkit_proposer_ngram", reason="the proposer is not installed")
    params = SamplingParams(
        max_tokens=60, temperature=temperature, seed=1, ignore_eos=True, extra={"no_repeat_ngram": {"size": 3}}
    )
    prompt = "1 2 3 1 2 4 1 2"
    with LLM("demo", proposer=proposer) as llm:
        found = llm.generate(prompt, params)[0].outputs[0].token_ids
        free = llm.generate(prompt, SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))[0]
    runs = [tuple(found[i : i + 3]) for i in range(len(found) - 2)]
    assert len(runs) == len(set(runs))
    repeated = free.outputs[0].token_ids
    assert len({tuple(repeated[i : i + 3]) for i in range(58)}) < 58, "without it runs come twice"
    with LLM("demo") as plain:
        assert plain.generate(prompt, params)[0].outputs[0].token_ids == found


@pytest.mark.parametrize("size", [0, -1, 1025, "3", None, 2.0, True])
def test_a_bad_size_is_refused(size: object) -> None:
    with LLM("demo") as llm, pytest.raises(InvalidParam, match=r"extra\.no_repeat_ngram"):
        llm.generate("1", SamplingParams(extra={"no_repeat_ngram": {"size": size}}))
