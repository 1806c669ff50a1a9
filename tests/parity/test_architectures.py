"""Every architecture that a model plugin proves: 64 greedy tokens of the whole engine against transformers, with and
without the prefix cache. The tiny configurations are those of the plugins' conformance tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lmkit import LLM, SamplingParams
from lmkit.api import ConfigError
from lmkit.config import CacheConfig, EngineConfig, ModelConfig, SchedConfig
from lmkit.plugins.resolve import resolve
from lmkit.testing import ArchitectureConformance
from lmkit.testing.checkpoints import byte_tokenizer, tiny_checkpoint
from lmkit.testing.model import prompt, reference

PLUGINS = Path(__file__).parents[2] / "plugins" / "models"
VOCAB, NEW = 259, 64
PARAMS = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)


def conformance_classes() -> Iterator[type[ArchitectureConformance]]:
    """The classes that the conformance tests of model plugins consist of."""
    for path in sorted(PLUGINS.glob("*/tests/test_*_conformance.py")):
        spec = importlib.util.spec_from_file_location(f"{path.stem}_of_{path.parts[-3]}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        tests = [value for name, value in vars(module).items() if name.startswith("Test") and isinstance(value, type)]
        yield from (kit for kit in tests if issubclass(kit, ArchitectureConformance))


CLASSES = {kit.name(): kit for kit in conformance_classes()}


def prompts() -> list[list[int]]:
    """The last two begin alike."""
    first, second, third = (prompt(VOCAB, length, seed=length) for length in (5, 23, 40))
    return [first, second, third, third[:32] + first]


def greedy(directory: Path, first_position: int) -> list[list[int]]:
    """NEW tokens for each prompt by transformers in float32."""
    model = reference(directory, "float32")
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    found = []
    for ids in prompts():
        if first_position:
            options["position_ids"] = torch.arange(first_position, first_position + len(ids))[None]
        with torch.no_grad():
            made = model.generate(torch.tensor([ids]), pad_token_id=0, **options)
        found.append(made[0, len(ids) :].tolist())
    return found


@pytest.mark.parametrize(
    ("architecture", "plugin"), [(name, kit.plugin) for name, kit in sorted(CLASSES.items())], ids=sorted(CLASSES)
)
def test_greedy_tokens(architecture: str, plugin: str, tmp_path: Path) -> None:
    kit = CLASSES[architecture]
    tiny_checkpoint(kit.family or architecture, tmp_path, **{**kit.values, "vocab_size": VOCAB, "eos_token_id": None})
    kit.name_architecture(tmp_path)
    byte_tokenizer(tmp_path)
    expected = greedy(tmp_path, kit.first_position)
    impl = "native" if plugin == f"model:{architecture}" else "transformers"
    with engine(tmp_path, impl) as llm:
        recurrent, cached = bool(llm.info.recurrent), bool(llm.resolved.value("prefix_cache"))
        assert cached != recurrent
        for attempt in range(1 + cached):  # the second time, prompts are in the cache
            outputs = llm.generate(prompts(), PARAMS, progress=False)
            assert [output.token_ids for output in outputs] == expected, f"{attempt=}"
        assert any(output.num_cached for output in outputs) == cached
        paged = bool(llm.info.kv_groups())
    if recurrent and paged:  # the state after whole blocks of prompts is kept where it is asked for
        with engine(tmp_path, impl, prefix_cache=True) as llm:
            for attempt in range(2):
                outputs = llm.generate(prompts(), PARAMS, progress=False)
                assert [output.token_ids for output in outputs] == expected, f"{attempt=}"
            assert any(output.num_cached for output in outputs)
    elif recurrent:
        with pytest.raises(ConfigError, match="no layer has attention"):
            engine(tmp_path, impl, prefix_cache=True)
    with engine(tmp_path, impl, num_blocks=48 if recurrent else 256, prefix_cache=False) as llm:
        outputs = llm.generate(prompts(), PARAMS, progress=False)
        assert [output.token_ids for output in outputs] == expected
        grows = any(need.window is None for need, _ in llm.info.kv_groups())
        assert (llm._engine.core.stats().num_preempted > 0) == (recurrent and grows)


def engine(directory: Path, impl: str, num_blocks: int = 256, prefix_cache: bool | None = None) -> LLM:
    model = ModelConfig(str(directory), dtype="float32", max_length=128, impl=impl)
    paged = bool(resolve(EngineConfig(model=model))[2].kv_groups())
    config = EngineConfig(
        model=model,
        cache=CacheConfig(block_size=4 if paged else None, num_blocks=num_blocks, prefix_cache=prefix_cache),
        sched=SchedConfig(max_tokens=48, max_rows=4),
    )
    return LLM(config=config)
