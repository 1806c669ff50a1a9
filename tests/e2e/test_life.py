"""Sleep and new weights of real, if tiny, models: what a changed engine says is what one says that began so."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch
from lmkit import LLM, AsyncLLM, SamplingParams
from lmkit.api import CheckpointError, ConfigError, EngineBusy, InvalidParam
from lmkit.config import from_options
from lmkit_python.stepping import LLMEngine
from lmkit_testing.checkpoints import byte_tokenizer, tiny_checkpoint
from safetensors.torch import load_file, save_file

VOCAB = 259  # bytes and three special tokens
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPTS = ["hello", "a longer text that fills more than one block of the cache", "hello"]
KINDS = {  # what holds weights in a way of its own
    "llama": ("llama", {}, {}),
    "tied": ("llama", {"tie_word_embeddings": True}, {}),
    "bfloat16": ("llama", {}, {"dtype": "bfloat16"}),  # packed in 12 bits
    "int8": ("llama", {"hidden_size": 64, "intermediate_size": 128}, {"quantization": "int8"}),
    "experts": ("Qwen3MoeForCausalLM", {}, {}),
    "latent": ("DeepseekV3ForCausalLM", {}, {}),  # one linear is used the other way round
    "state": ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}, {}),
}


def say(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict]:
    """Two checkpoints of one shape, and the options to run them with."""
    pytest.importorskip("transformers")
    family, values, options = KINDS[request.param]
    a, b = (made(family, tmp_path_factory.mktemp("model"), seed, values) for seed in (0, 1))
    return a, b, {"max_rows": 4, "kv_memory": "4MiB", **options}


def made(family: str, folder: Path, seed: int, values: dict) -> Path:
    path = tiny_checkpoint(family, folder, seed=seed, vocab_size=VOCAB, **values)
    assert byte_tokenizer(path) == VOCAB
    return path


@pytest.mark.one_in(6)
def test_a_changed_engine_is_like_a_new_one(pair: tuple[Path, Path, dict]) -> None:
    """All weights of a folder; then some after the others, by name; with the prefix cache full of the old ones."""
    a, b, options = pair
    with LLM(str(b), **options) as other:
        expected_b = say(other)
    with LLM(str(a), **options) as llm:
        expected_a = say(llm)
        assert expected_a != expected_b
        llm.update_weights(b)
        assert say(llm) == expected_b
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert say(llm) == expected_b
        tensors = load_file(a / "model.safetensors")
        layer = {name: tensor for name, tensor in tensors.items() if ".layers.0." in name}
        rest = {name: tensor for name, tensor in tensors.items() if name not in layer}
        llm.update_weights(layer, partial=True)
        assert say(llm) not in (expected_a, expected_b)
        llm.update_weights(rest, partial=True)
        assert say(llm) == expected_a
        llm.reset_prefix_cache()
        assert say(llm) == expected_a


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    pytest.importorskip("transformers")
    return made("llama", tmp_path_factory.mktemp("a"), 0, {}), made("llama", tmp_path_factory.mktemp("b"), 1, {})


def test_what_runs_goes_on_with_the_new_weights(two: tuple[Path, Path]) -> None:
    """From the tokens that it has: nothing is lost, nothing doubled."""
    a, b = two
    with LLM(str(a), max_rows=4) as llm:
        with LLMEngine(llm) as engine:
            engine.add_request("r", [1, 2, 3], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
            begun = []
            while len(begun) < 4:
                begun = engine.step()[0].token_ids
            llm.update_weights(b)
            while engine.has_unfinished_requests():
                (output,) = engine.step()
            tokens = output.token_ids
        assert tokens[:4] == begun
        left = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        assert llm.generate([[1, 2, 3, *begun]], left)[0].token_ids == tokens[4:]
        with pytest.raises(CheckpointError, match="weights do not fit"):
            llm.update_weights({"model.norm.weight": load_file(b / "model.safetensors")["model.norm.weight"]})
        assert not llm.is_paused


def test_sleep_frees_what_it_says(two: tuple[Path, Path]) -> None:
    """At once, without waiting for a collection: cache and graphs at level 1, the model too at level 2; and an update
    keeps one model."""
    with LLM(str(two[0]), max_rows=4, kv_memory="4MiB") as llm:
        say(llm)
        worker = llm._engine.core.executor.worker

        def held() -> list[bool]:
            return [ref() is not None for ref in refs]

        def watched() -> list[weakref.ref]:
            return [weakref.ref(part) for part in (worker.runner, worker.runner.blocks, worker.loaded.model)]

        refs = watched()
        llm.sleep(1)
        assert held() == [False, False, True]
        llm.wake_up()
        refs = watched()
        llm.sleep(2)
        assert held() == [False, False, False]
        llm.wake_up()
        refs = watched()
        llm.update_weights(two[1])
        assert held() == [False, False, False]


def test_a_paused_llm_says_so(two: tuple[Path, Path]) -> None:
    with LLM(str(two[0]), max_rows=4) as llm:
        expected = say(llm)
        with LLMEngine(llm) as engine:
            engine.add_request("r", "hello", GREEDY)
            engine.step()
            llm.sleep(2)
            (output,) = engine.step()
            assert output.finish_reason == "abort"
        assert llm.is_sleeping
        with pytest.raises(EngineBusy, match="asleep"):
            say(llm)
        with pytest.raises(ConfigError, match="wake"):
            llm.resume()
        with pytest.raises(ConfigError, match="asleep"):
            llm.update_weights(two[1])
        llm.wake_up()
        assert say(llm) == expected
        for level in (0, 3, True, "1"):
            with pytest.raises(InvalidParam, match="level"):
                llm.sleep(level)
        with pytest.raises(InvalidParam, match="mode"):
            llm.pause("never")
        assert not llm.is_paused


def test_adapters_stay(two: tuple[Path, Path], tmp_path: Path) -> None:
    """They are added to the new weights as to the old ones, also when one is dropped meanwhile."""
    numbers = torch.Generator().manual_seed(3)
    name, sizes = "base_model.model.model.layers.{}.mlp.down_proj.lora_{}.weight", {"A": (4, 80), "B": (48, 4)}
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["down_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    tensors = {name.format(i, s): torch.randn(size, generator=numbers) for i in (0, 1) for s, size in sizes.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    options = {"max_rows": 4, "kv_memory": "4MiB", "enable_lora": True}

    def adapted(llm: LLM) -> list[list[int]]:
        return [output.token_ids for output in llm.generate(PROMPTS, GREEDY, adapter="x")]

    with LLM(str(two[1]), **options) as other:
        other.load_adapter("x", str(tmp_path))
        expected = adapted(other)
        assert expected != say(other)
    with LLM(str(two[0]), **options) as llm:
        for adapter in "xy":
            llm.load_adapter(adapter, str(tmp_path))
        llm.update_weights(two[1])
        assert adapted(llm) == expected
        llm.sleep(2)
        llm.unload_adapter("y")
        llm.wake_up()
        assert adapted(llm) == expected


@pytest.mark.full("lmkit-python", "lmkit-http")
async def test_the_same_in_a_process_of_its_own(two: tuple[Path, Path]) -> None:
    a, b = two
    with LLM(str(b), max_rows=4) as other:
        expected = say(other)
    async with await AsyncLLM.start(from_options({"model": str(a), "max_rows": 4})) as llm:
        before = [output.token_ids for output in await llm.generate(PROMPTS, GREEDY)]
        await llm.life.update_weights(load_file(b / "model.safetensors"))
        await llm.life.sleep(1)
        assert await llm.life.state() == "asleep"
        await llm.life.wake_up()
        assert [output.token_ids for output in await llm.generate(PROMPTS, GREEDY)] == expected != before
