"""The KV cache in float8: answers near those of the full cache; scales of the checkpoint say what is cached."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from lmkit import LLM, SamplingParams
from lmkit.api import CheckpointError
from lmkit.config import CacheConfig, EngineConfig, ModelConfig, SchedConfig
from lmkit_testing.checkpoints import byte_tokenizer, tiny_checkpoint
from safetensors.torch import load_file, save_file

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
FACTOR = 2.0**14  # of keys and values: far beyond what float8 e4m3 holds
SPELLINGS = ("{}_scale", "attn.{}_scale", "{}_proj.{}_scale", "{}_proj.output_scale")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys and values are large; queries, which are small, and the output projection make up for it."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_checkpoint("llama", folder, vocab_size=259, eos_token_id=None, head_dim=16)
    byte_tokenizer(folder)
    stored = load_file(folder / "model.safetensors")
    for name, tensor in stored.items():
        tensor *= FACTOR if "k_proj" in name or "v_proj" in name else 1
        tensor /= 16 * FACTOR if "q_proj" in name else FACTOR if "o_proj" in name else 1
    save_file(stored, folder / "model.safetensors")
    return folder


def scaled(plain: Path, folder: Path, spelling: str, k: float = FACTOR / 16, v: float = FACTOR / 32) -> Path:
    """The same checkpoint with scales of its cache."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((plain / name).read_bytes())
    stored = load_file(plain / "model.safetensors")
    blocks = {name.partition("k_proj")[0] for name in stored if "k_proj" in name}
    for block in blocks:
        stored[block + spelling.format("k", "k")] = torch.tensor(k)
        stored[block + spelling.format("v", "v")] = torch.tensor([v], dtype=torch.bfloat16)
    save_file(stored, folder / "model.safetensors")
    return folder


def engine(directory: Path, attention: str, cache: str, budget: int = 512) -> LLM:
    return LLM(
        config=EngineConfig(
            model=ModelConfig(str(directory), dtype="float32", max_length=128),
            cache=CacheConfig(dtype=cache, num_blocks=64),
            sched=SchedConfig(max_tokens=budget, max_rows=8),
            wanted={"attention": attention},
        )
    )


def answers(directory: Path, attention: str, cache: str, budget: int = 512) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens, and the logarithms of the probabilities of the prompts'."""
    numbers = random.Random(2)
    prompts = [[numbers.randrange(3, 250) for _ in range(numbers.randrange(17, 50))] for _ in range(6)]
    with engine(directory, attention, cache, budget) as llm:
        outputs = llm.generate(prompts, GREEDY, progress=False)
    logprobs = [e.logprob for o in outputs for e in o.prompt_logprobs or ()]
    return [o.token_ids for o in outputs], torch.tensor(logprobs)


@pytest.mark.parametrize("attention", ["cpu", "torch"])
@pytest.mark.one_in(4)
@pytest.mark.parametrize(("cache", "allowed"), [("fp8_e4m3", 0.12), ("fp8_e5m2", 0.22)])
def test_near_the_full_cache_with_scales(
    plain: Path, tmp_path: Path, attention: str, cache: str, allowed: float
) -> None:
    folder = scaled(plain, tmp_path / "scaled", "{}_scale")
    _, full = answers(folder, attention, "float32")  # where scales are not needed
    tokens, short = answers(folder, attention, cache)
    _, cut = answers(plain, attention, cache)
    assert 0 < (short - full).abs().mean() < allowed
    assert (cut - full).abs().mean() > 2 * (short - full).abs().mean()  # what scales are for
    assert answers(folder, attention, cache, 24)[0] == tokens  # however the work is cut


@pytest.mark.one_in(4)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_scales_are_found_under_any_name(plain: Path, tmp_path: Path, spelling: str) -> None:
    _, expected = answers(scaled(plain, tmp_path / "usual", SPELLINGS[0]), "cpu", "fp8")
    _, got = answers(scaled(plain, tmp_path / "other", spelling), "cpu", "fp8")
    assert torch.equal(got, expected)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("k", "v"), [(0.0, 1.0), (1.0, -2.0), (float("nan"), 1.0), (1.0, float("inf"))])
def test_scales_that_cannot_be_are_refused(plain: Path, tmp_path: Path, k: float, v: float) -> None:
    folder = scaled(plain, tmp_path / "scaled", "{}_scale", k, v)
    name = "v" if k == 1 else "k"
    with pytest.raises(CheckpointError, match=rf"layers\.\d\.attn\.attn: {name}_scale is"):
        engine(folder, "torch", "fp8").close()
    engine(folder, "torch", "auto").close()
