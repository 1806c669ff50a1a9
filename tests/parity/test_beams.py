"""Beam search of the whole engine against `generate(num_beams=4)` of transformers, in float32: outputs and scores."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from lmkit import LLM, BeamSearchParams
from lmkit_testing.checkpoints import byte_tokenizer, tiny_checkpoint
from lmkit_testing.model import installed, reference

WIDTH, NEW = 4, 12  # beams, and tokens of an output at most
TINY = {"llama": {"head_dim": 16}, "qwen3": {}}
EARLY = (True, False, "never")
PENALTIES = (-0.5, 0.0, 1.0, 2.0)
PROMPTS = ("What is 2 + 3?", "Tell me about lmkit", "yes")


Engine = tuple[LLM, Any, tuple[int, ...]]


@pytest.fixture(scope="module", params=["demo", *TINY])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine, the model of transformers with the same weights, and what ends an output.

    Of the tiny models these are also some tokens that they do say.
    """
    name = request.param
    if name != "demo":
        folder = tmp_path_factory.mktemp(name)
        tiny_checkpoint(name, folder, vocab_size=259, eos_token_id=None, **TINY[name])
        byte_tokenizer(folder)
        name = str(folder)
    with LLM(name, host=installed(), dtype="float32", kv_memory="64MiB", max_rows=16, max_length=64) as llm:
        assert isinstance(llm.checkpoint.path, Path)
        ends = llm.facts.eos_token_ids
        if request.param in TINY:
            found = llm.beam_search(list(PROMPTS), BeamSearchParams(WIDTH, NEW, ignore_eos=True))
            ends = tuple({*ends, *[output.sequences[0].tokens[place] for output in found for place in (-9, -2)]})
        yield llm, reference(llm.checkpoint.path, "float32").eval(), ends


def wanted(
    model: Any, ids: list[int], early: bool | Literal["never"], penalty: float, ends: tuple[int, ...]
) -> list[tuple[list[int], float]]:
    """The outputs of transformers for one prompt and their scores, best first."""
    tokens = torch.tensor([ids])
    found = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, num_beams=WIDTH, num_return_sequences=WIDTH,
        max_new_tokens=NEW, length_penalty=penalty, early_stopping=early, eos_token_id=list(ends) or None,
        pad_token_id=0, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    lengths = (found.beam_indices >= 0).sum(1).tolist()  # outputs that ended are padded
    texts = [row[len(ids) : len(ids) + n].tolist() for row, n in zip(found.sequences, lengths, strict=True)]
    return list(zip(texts, found.sequences_scores.tolist(), strict=True))


@pytest.mark.parametrize(("early", "penalty", "ended"), [*product(EARLY, PENALTIES, (True, False))])
@pytest.mark.one_in(21)
def test_beams_equal_those_of_transformers(
    engine: Engine, early: bool | Literal["never"], penalty: float, ended: bool
) -> None:
    llm, model, ends = engine
    ends = ends if ended else ()
    prompts = [llm.text.encode_prompt(text) for text in PROMPTS]
    params = BeamSearchParams(
        WIDTH, NEW, ignore_eos=not ended, length_penalty=penalty, early_stopping=early, stop_token_ids=ends
    )
    for ids, output in zip(prompts, llm.beam_search(prompts, params), strict=True):
        expected = wanted(model, ids, early, penalty, ends)
        assert [found.tokens[len(ids) :] for found in output.sequences] == [text for text, _ in expected]
        scores = [found.score for found in output.sequences]
        assert scores == pytest.approx([score for _, score in expected], rel=1e-4, abs=1e-4)


@pytest.mark.one_in(3)
def test_how_long_is_searched_matters(engine: Engine) -> None:
    """The cases above differ: outputs end, and not all ways to search find the same."""
    llm, _, ends = engine
    found = []
    for early, penalty in product(EARLY, PENALTIES):
        params = BeamSearchParams(WIDTH, NEW, length_penalty=penalty, early_stopping=early, stop_token_ids=ends)
        found.append([one for output in llm.beam_search(list(PROMPTS), params) for one in output.sequences])
    assert any(one.finish_reason == "stop" for ones in found for one in ones)
    assert len({str([one.tokens for one in ones]) for ones in found}) > 3
