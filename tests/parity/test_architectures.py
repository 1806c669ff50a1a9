"""Every architecture that a model plugin proves: greedy tokens of the whole engine against transformers, through what
`auto` chooses for a user and through the reference, with and without the prefix cache. The configurations are those of
the plugins' conformance tests, with heads as in released checkpoints.

What transformers says is kept in `greedy.json`, under a hash of all that it depends on; what is not there is computed.
`nox -s expected` renews the file, and `cover.json`: which architectures a quick run takes.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lmkit import LLM, SamplingParams
from lmkit.api import ConfigError
from lmkit.config import CacheConfig, EngineConfig, ModelConfig, SchedConfig
from lmkit_testing.checkpoints import byte_tokenizer, tiny_checkpoint
from lmkit_testing.model import installed, prompt, reference

from .classes import conformance_classes

EXPECTED = Path(__file__).with_name("greedy.json")
VOCAB = 259
NEW = int(os.environ.get("GREEDY_TOKENS", "24"))
PARAMS = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
# pinned: the reference has to give the same as what is chosen, over blocks that no other backend has
REFERENCE: dict[str, Any] = {"attention": "torch", "op": "linear_reference,rowwise_torch", "block_size": 4}

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


def fingerprint(directory: Path) -> str:
    """Of all on which greedy tokens depend: weights, configuration, prompts, and who computes them."""
    import transformers

    found = hashlib.sha256(f"{transformers.__version__} {NEW} {prompts()}".encode())
    for path in sorted(directory.rglob("*")):
        if path.name == "config.json":
            config = json.loads(path.read_text())
            config.pop("transformers_version", None)
            found.update(json.dumps(config, sort_keys=True).encode())
        elif path.suffix == ".safetensors":
            found.update(path.read_bytes())
    return found.hexdigest()[:32]


def expected_tokens(architecture: str, directory: Path) -> list[list[int]]:
    """From the file where it knows this very checkpoint, else by transformers."""
    known = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    of = fingerprint(directory)
    if known.get(architecture, {}).get("of") != of:
        known[architecture] = {"of": of, "tokens": greedy(directory, CLASSES[architecture].first_position)}
        if os.environ.get("EXPECTED") == "write":
            lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(known.items())]
            EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    tokens: list[list[int]] = known[architecture]["tokens"]
    return tokens


@pytest.mark.parametrize(
    ("architecture", "plugin"), [(name, kit.plugin) for name, kit in sorted(CLASSES.items())], ids=sorted(CLASSES)
)
@pytest.mark.one_in(4)
def test_greedy_tokens(architecture: str, plugin: str, tmp_path: Path) -> None:
    kit = CLASSES[architecture]
    values = {**kit.values, **kit.published, "vocab_size": VOCAB, "eos_token_id": None}
    tiny_checkpoint(kit.family or architecture, tmp_path, **values)
    kit.name_architecture(tmp_path)
    expected = expected_tokens(architecture, tmp_path)
    byte_tokenizer(tmp_path)
    impl = "native" if plugin == f"model:{architecture}" else "transformers"
    with engine(tmp_path, impl) as llm:
        chosen = llm.resolved.choice("attention", "text")
        assert chosen is None or chosen.name == "cpu"
        recurrent, cached = bool(llm.info.recurrent), bool(llm.resolved.value("prefix_cache"))
        assert cached != recurrent
        paged = bool(llm.info.kv_groups())
        for attempt in range(1 + cached):  # the second time, prompts are in the cache
            check(llm, expected, f"{attempt=}", cached=attempt > 0)
    if recurrent and paged:  # the state after whole blocks of prompts is kept where it is asked for
        with engine(tmp_path, impl, prefix_cache=True) as llm:
            for attempt in range(2):
                check(llm, expected, f"kept states, {attempt=}", cached=attempt > 0)
    elif recurrent:
        with pytest.raises(ConfigError, match="no layer has attention"):
            engine(tmp_path, impl, prefix_cache=True)
    pinned = {key: value for key, value in REFERENCE.items() if paged or key == "op"}
    with engine(tmp_path, impl, num_blocks=48 if recurrent else 256, prefix_cache=False, **pinned) as llm:
        check(llm, expected, "reference")
        grows = any(need.window is None for need, _ in llm.info.kv_groups())
        assert (llm._engine.core.stats().num_preempted > 0) == (recurrent and grows)


def check(llm: LLM, expected: list[list[int]], what: str, cached: bool = False) -> None:
    outputs = llm.generate(prompts(), PARAMS, progress=False)
    assert [output.token_ids for output in outputs] == expected, what
    assert any(output.num_cached for output in outputs) or not cached


def engine(
    directory: Path, impl: str, num_blocks: int = 64, prefix_cache: bool | None = None, attention: str = "auto",
    op: str = "auto", block_size: int | None = None,
) -> LLM:  # fmt: skip
    config = EngineConfig(
        model=ModelConfig(str(directory), dtype="float32", max_length=128, impl=impl),
        cache=CacheConfig(block_size=block_size, num_blocks=num_blocks, prefix_cache=prefix_cache),
        sched=SchedConfig(max_tokens=48, max_rows=4),
        wanted={"attention": attention, "op": op},
    )
    return LLM(config=config, host=installed())
