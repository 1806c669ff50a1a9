"""Greedy tokens of the whole engine against transformers, however the work is cut: chunks, batches, prefix cache,
preemption, block size."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from lmkit import LLM, SamplingParams
from lmkit.config import CacheConfig, EngineConfig, ModelConfig, SchedConfig
from lmkit_testing.checkpoints import byte_tokenizer, tiny_checkpoint
from lmkit_testing.model import installed, reference

VOCAB = 259
NEW = 10
FAMILIES = {
    "llama": {"head_dim": 16},
    "mistral": {"head_dim": 16},
    "qwen2": {"hidden_size": 64, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},  # two kinds
    "qwen3": {},
}
# What is varied: a step takes at most `budget` tokens and `rows` requests.
WAYS = {
    "whole": {},
    "chunks": {"budget": 7},
    "token by token": {"budget": 1, "rows": 1},
    "one at a time": {"rows": 1},
    "no prefix cache": {"prefix_cache": False},
    "blocks of 1": {"block_size": 1, "num_blocks": 2048},  # pinned: the reference runs on blocks of any size
    "blocks of 64": {"block_size": 64},  # pinned: size of blocks is what is varied
    "preempted": {"num_blocks": 8, "prefix_cache": False},
    "preempted, prefix cache": {"num_blocks": 8},
}


def prompts(count: int = 16) -> list[list[int]]:
    """Prompts of 1 to 40 tokens; each second one continues the beginning of the one before."""
    numbers = random.Random(1)
    made: list[list[int]] = []
    for i in range(count):
        fresh = [numbers.randrange(3, VOCAB) for _ in range(numbers.randrange(1, 20))]
        made.append(made[-1] + fresh if i % 2 else fresh)
    return made


def greedy(directory: Path, asked: Sequence[Sequence[int]]) -> list[list[int]]:
    """NEW tokens for each prompt by transformers in float32, without a cache."""
    model = reference(directory, "float32")
    outputs = []
    for prompt in asked:
        ids = list(prompt)
        for _ in range(NEW):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        outputs.append(ids[len(prompt) :])
    return outputs


def engine(
    directory: Path, dtype: str = "float32", *, budget: int = 512, rows: int = 16, prefix_cache: bool = True,
    block_size: int | None = None, num_blocks: int = 128,
) -> LLM:  # fmt: skip
    return LLM(
        host=installed(),
        config=EngineConfig(
            model=ModelConfig(str(directory), dtype=dtype, max_length=64),
            cache=CacheConfig(block_size=block_size, num_blocks=num_blocks, prefix_cache=prefix_cache),
            sched=SchedConfig(max_tokens=budget, max_rows=rows),
        ),
    )


@pytest.fixture(scope="module", params=list(FAMILIES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    tiny_checkpoint(request.param, folder, vocab_size=VOCAB, eos_token_id=None, **FAMILIES[request.param])
    assert byte_tokenizer(folder) == VOCAB
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Iterator[list[list[int]]]:
    return greedy(checkpoint, prompts())


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.one_in(8)
def test_tokens_equal_those_of_transformers(checkpoint: Path, expected: list[list[int]], way: str) -> None:
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    with engine(checkpoint, **WAYS[way]) as llm:
        for attempt in range(2):  # the second time, prompts are in the prefix cache
            outputs = llm.generate(prompts(), params, progress=False)
            assert [output.token_ids for output in outputs] == expected, f"attempt {attempt}"
        stats = llm._engine.core.stats()
        assert llm.resolved.choice("attention", "text").name == ("torch" if way == "blocks of 1" else "cpu")
    assert ("preempted" in way) == (stats.num_preempted > 0)
    if WAYS[way].get("prefix_cache", True) and "preempted" not in way and way != "blocks of 64":
        assert any(output.num_cached for output in outputs)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", ["whole", "chunks", "preempted"])
def test_bfloat16_tokens_are_near_the_best(checkpoint: Path, way: str) -> None:
    """Each token chosen in bfloat16 has a float32 logit near the largest, given the tokens before it."""
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    with engine(checkpoint, "bfloat16", **WAYS[way]) as llm:
        outputs = llm.generate(prompts(), params, progress=False)
    model = reference(checkpoint, "float32")
    for output in outputs:
        ids = [*output.prompt_token_ids, *output.token_ids]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, len(output.prompt_token_ids) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        gap = (logits.amax(1) - chosen) / logits.abs().amax(1)
        assert float(gap.max()) < 0.15


def test_logprobs_equal_those_of_transformers(checkpoint: Path) -> None:
    """Of the chosen tokens and of the prompt."""
    asked = [p for p in prompts() if len(p) > 4][:4]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    with engine(checkpoint, budget=8) as llm:
        outputs = llm.generate(asked, params, progress=False)
    model = reference(checkpoint, "float32")
    for output in outputs:
        ids = [*output.prompt_token_ids, *output.token_ids]
        with torch.no_grad():
            wanted = model(torch.tensor([ids])).logits[0].log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
        assert output.prompt_logprobs is not None
        assert output.logprobs is not None
        got = [entry.logprob for entry in (*output.prompt_logprobs, *output.logprobs)]
        torch.testing.assert_close(torch.tensor(got), wanted[:, 0], atol=2e-4, rtol=1e-4)
