"""The KV cache as 8-bit integers: answers near those of the full cache, the same however the work is cut."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from lmkit import LLM, SamplingParams
from lmkit.api import AttnNeed, SelectionError
from lmkit.config import CacheConfig, EngineConfig, ModelConfig, SchedConfig
from lmkit_testing.checkpoints import byte_tokenizer, tiny_checkpoint

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"budget": 24},
    "no prefix cache": {"prefix_cache": False},
    "preempted": {"num_blocks": 16},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_checkpoint("llama", folder, vocab_size=259, eos_token_id=None, head_dim=16)
    byte_tokenizer(folder)
    return folder


def prompts() -> list[list[int]]:
    """Each second one continues the one before, by whole blocks and more."""
    numbers = random.Random(2)
    made: list[list[int]] = []
    for i in range(8):
        fresh = [numbers.randrange(3, 250) for _ in range(numbers.randrange(17, 50))]
        made.append(made[-1] + fresh if i % 2 else fresh)
    return made


def engine(
    directory: Path, attention: str, dtype: str, budget: int = 512, prefix_cache: bool = True, num_blocks: int = 128
) -> LLM:
    return LLM(
        config=EngineConfig(
            model=ModelConfig(str(directory), dtype="float32", max_length=128),
            cache=CacheConfig(dtype=dtype, num_blocks=num_blocks, prefix_cache=prefix_cache),
            sched=SchedConfig(max_tokens=budget, max_rows=8),
            wanted={"attention": attention},
        )
    )


def answers(llm: LLM) -> list[tuple[list[int], list[float]]]:
    """Tokens, and the logarithms of the probabilities of the prompt's."""
    outputs = llm.generate(prompts(), GREEDY, progress=False)
    return [(o.token_ids, [e.logprob for e in o.prompt_logprobs or ()]) for o in outputs]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("attention", ["cpu", "torch"])
def test_near_the_full_cache(checkpoint: Path, attention: str) -> None:
    with engine(checkpoint, attention, "float32") as llm:
        full = answers(llm)
    with engine(checkpoint, attention, "int8_per_token_head") as llm:
        short = answers(llm)
    for (_, expected), (_, got) in zip(full, short, strict=True):
        assert got != expected
        torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("attention", ["cpu", "torch"])
@pytest.mark.one_in(2)
def test_the_same_tokens_however_the_work_is_cut(checkpoint: Path, attention: str) -> None:
    seen = {}
    for name, options in WAYS.items():
        with engine(checkpoint, attention, "int8", **options) as llm:
            answers(llm)
            seen[name] = [tokens for tokens, _ in answers(llm)]  # prompts are in the prefix cache now
            assert ("preempted" in name) == (llm._engine.core.stats().num_preempted > 0)
    assert all(tokens == seen["whole"] for tokens in seen.values())


def test_bytes_of_a_token() -> None:
    """Values of a byte each and two scales, per head."""
    need = AttnNeed(64, 14, 2)
    assert need.kv_bytes("bfloat16") == 2 * 2 * 64 * 2
    assert need.kv_bytes("int8") == 2 * (2 * 64 + 8)


def test_unknown_types_are_refused_by_name(checkpoint: Path) -> None:
    with pytest.raises(SelectionError, match=r"kv-dtype.*int4"):
        engine(checkpoint, "torch", "int4").close()
