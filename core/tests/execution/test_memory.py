"""Memory planning: budgets, sharing among KV groups, errors that name needed, available and the fix."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmkit.api import (
    AttnNeed,
    CapacityError,
    ConfigError,
    DeviceInfo,
    KVConfig,
    LayerInfo,
    ModelInfo,
    WorkerFacts,
)
from lmkit.config import CacheConfig, EngineConfig, ModelConfig, SchedConfig
from lmkit.execution.memory import activation_bytes, blocks_needed, estimate, fit_length, plan_kv, step_tokens

GIB = 1 << 30
NEED = AttnNeed(head_dim=64, num_q_heads=14, num_kv_heads=2)


def model(windows: tuple[int | None, ...] = (None,) * 24, max_length: int = 32768) -> ModelInfo:
    return ModelInfo(
        architecture="Some",
        vocab_size=151936,
        hidden_size=896,
        layers=tuple(LayerInfo(i, replace(NEED, window=w)) for i, w in enumerate(windows)),
        max_length=max_length,
        dtype="bfloat16",
        num_parameters=494_000_000,
        intermediate_size=4864,
    )


def facts(info: ModelInfo, free: int, block_size: int = 16) -> WorkerFacts:
    return WorkerFacts(free, 0, 0, tuple(info.kv_specs(block_size, "bfloat16")))


def test_auto_takes_what_is_free_but_no_more_than_the_rows_can_use() -> None:
    info = model()
    per_token = 24 * 2 * 128 * 2
    few = plan_kv(facts(info, GIB), EngineConfig(), max_length=info.max_length)
    assert GIB - 16 * per_token < few.nbytes <= GIB
    some = EngineConfig(sched=SchedConfig(max_rows=2))
    enough = plan_kv(facts(info, 100 * GIB), some, max_length=1024)
    assert enough.num_blocks == (1 + 2 * 1024 // 16,)
    assert enough.num_tokens == 2048


@pytest.mark.parametrize(("text", "expected"), [("512MiB", GIB // 2), ("50%", GIB), ("1000000000", 10**9)])
def test_budgets_of_the_user(text: str, expected: int) -> None:
    info = model()
    kv = plan_kv(facts(info, 2 * GIB), EngineConfig(cache=CacheConfig(memory=text)), max_length=info.max_length)
    block = kv.specs[0].bytes_per_block
    assert expected - block < kv.nbytes <= expected


def test_a_budget_that_is_no_size_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cache\.memory"):
        plan_kv(facts(model(), GIB), EngineConfig(cache=CacheConfig(memory="lots")))


def test_number_of_blocks_is_taken_literally() -> None:
    config = EngineConfig(cache=CacheConfig(num_blocks=40), model=ModelConfig(max_length=64))
    assert plan_kv(facts(model(), GIB), config).num_blocks == (40,)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (EngineConfig(cache=CacheConfig(memory="3GiB")), "cache.memory"),
        (EngineConfig(cache=CacheConfig(num_blocks=100_000)), "cache.num_blocks"),
        (EngineConfig(model=ModelConfig(max_length=200_000)), "one request of 200000 tokens"),
        (EngineConfig(cache=CacheConfig(memory="1MiB")), "one request of 256 tokens"),
    ],
)
def test_too_little_memory_names_needed_available_and_the_fix(config: EngineConfig, what: str) -> None:
    with pytest.raises(CapacityError) as e:
        plan_kv(facts(model(), GIB), config, max_length=32768)
    assert what in str(e.value)
    assert str(e.value).replace("3GiB'", "").count("iB") == 2
    assert "--max-length" in e.value.fix


@given(
    st.integers(1, 64), st.sampled_from([1, 16, 64]), st.integers(16, 4096), st.integers(8, 4096),
    st.integers(1, 2048),
)  # fmt: skip
def test_groups_run_out_together(megabytes: int, block_size: int, window: int, length: int, max_tokens: int) -> None:
    """Every group holds the same number of rows of the longest length, up to one row's rounding; all in the budget."""
    info = model((None, window, window))
    free = megabytes << 20
    try:
        kv = plan_kv(
            facts(info, free, block_size), EngineConfig(model=ModelConfig(max_length=length)), max_tokens=max_tokens
        )
    except CapacityError:
        one = sum(
            s.bytes_per_block * (1 + blocks_needed(s, length, max_tokens))
            for s in info.kv_specs(block_size, "bfloat16")
        )
        assert one > free
        return
    assert kv.nbytes <= free
    rows = [(n - 1) / blocks_needed(s, length, max_tokens) for s, n in zip(kv.specs, kv.num_blocks, strict=True)]
    assert min(rows) >= 1
    assert max(rows) - min(rows) <= 1


def test_length_is_what_the_cache_holds() -> None:
    info = model()
    specs = tuple(info.kv_specs(16, "bfloat16"))
    assert fit_length(info, KVConfig(specs, (11,))) == 160
    assert fit_length(info, KVConfig(specs, (10_000,))) == 32768
    assert fit_length(info, KVConfig(specs, (11,)), 100) == 100


def test_step_budget_is_honoured() -> None:
    assert step_tokens(EngineConfig(sched=SchedConfig(max_tokens=16))) == 16


def test_activations_grow_with_tokens_rows_and_vocabulary() -> None:
    info = model()
    base = activation_bytes(info, "bfloat16", 512, 8)
    assert activation_bytes(info, "bfloat16", 1024, 8) > base
    assert activation_bytes(info, "bfloat16", 512, 16) - base == 8 * 151936 * 14
    assert activation_bytes(info, "float32", 512, 8) > base


def test_estimate_adds_up() -> None:
    info = model()
    device = DeviceInfo("some", "cpu", total_memory=16 * GIB, free_memory=8 * GIB, dtypes=("bfloat16",))
    found = estimate(info, EngineConfig(), device)
    assert found.weight_bytes == 2 * info.num_parameters
    assert found.weight_bytes + found.activation_bytes + found.kv_bytes <= 8 * GIB
    assert found.kv_bytes_per_token == 24 * 2 * 128 * 2
    assert found.max_length == 32768
    assert found.concurrency == pytest.approx(found.num_kv_tokens / 32768)
    assert estimate(info, EngineConfig(), device, dtype="float32").weight_bytes == 4 * info.num_parameters


def test_estimate_refuses_what_cannot_fit() -> None:
    device = DeviceInfo("some", "cpu", total_memory=GIB // 2, dtypes=("bfloat16",))
    with pytest.raises(CapacityError, match="weights"):
        estimate(model(), EngineConfig(), device)
