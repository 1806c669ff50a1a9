"""After the last layer's attention only tokens whose hidden states are read go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lmkit import LLM, SamplingParams
from lmkit_decoders import Decoder
from lmkit_testing.checkpoints import byte_tokenizer, tiny_checkpoint

LENGTHS = (50, 3, 29, 41, 17)  # in steps of 16 tokens: chunks beside rows that decode
PROMPTS = [[(7 * row + 3 * i) % 200 + 10 for i in range(length)] for row, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module", params=["llama", "MixtralForCausalLM"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_checkpoint(request.param, tmp_path_factory.mktemp("model"), vocab_size=259)
    byte_tokenizer(path)
    return path


def start(model: Path) -> LLM:
    return LLM(str(model), dtype="float32", max_step_tokens=16, max_rows=8, kv_memory="8MiB", prefix_cache=False)


def params(**more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=3, **more)


def rows_seen(llm: LLM, layer: int) -> list[int]:
    """A list to which each step adds how many rows the MLP of `layer` gets."""
    seen: list[int] = []
    mlp = llm._engine.core.executor.worker.loaded.model.layers[layer].mlp
    mlp.register_forward_hook(lambda module, args, out: seen.append(len(args[0])))
    return seen


def test_the_last_mlp_sees_what_is_sampled(model: Path) -> None:
    with start(model) as llm:
        worker = llm._engine.core.executor.worker
        worker.runner.graphs.run = lambda forward, x: forward(x)  # replayed steps do not call modules
        first, last = rows_seen(llm, 0), rows_seen(llm, -1)
        llm.generate(PROMPTS, params())
    assert sum(first) == sum(LENGTHS) + 5 * len(PROMPTS)
    assert sum(last) == 6 * len(PROMPTS)
    assert 0 in last, "a chunk that samples nothing"


@pytest.mark.one_in(2)
def test_mixed_batches_say_the_same(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding rows, chunks of prompts and prompt log-probabilities in one step."""
    given = [params(prompt_logprobs=2) if row % 2 else params() for row in range(len(PROMPTS))]
    with start(model) as llm:
        got = llm.generate(PROMPTS, given)
    monkeypatch.setattr(Decoder, "read", lambda self, layer, x, *tensors: tensors)
    with start(model) as llm:
        expected = llm.generate(PROMPTS, given)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert values(ours.logprobs) == pytest.approx(values(theirs.logprobs), abs=1e-4)
        assert values(ours.prompt_logprobs) == pytest.approx(values(theirs.prompt_logprobs), abs=1e-4)


def values(logprobs: Any) -> list[float]:
    return [entry.logprob for entry in logprobs or []]
