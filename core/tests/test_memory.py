"""Memory planning: budgets, sharing among KV groups, errors that name needed, available and the fix."""

from __future__ import annotations

import re
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
    LinearSpec,
    ModelInfo,
    StateTensor,
    WorkerFacts,
)
from lmkit.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedConfig
from lmkit.contracts.config import LoraConfig
from lmkit.memory import activation_bytes, adapter_bytes, blocks_needed, fit_length, plan_kv, step_tokens
from lmkit_cli.estimate import estimate

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


@st.composite
def mixed_models(draw: st.DrawFn) -> ModelInfo:
    """Layers with and without windows, and with recurrent state."""
    state = StateTensor("state", (draw(st.sampled_from([1, 300, 70_000])),))
    kinds = draw(st.lists(st.sampled_from([None, 1, 16, 128, 4096, "state"]), min_size=1, max_size=5))
    layers = [
        LayerInfo(i, None, state=(state,)) if kind == "state" else LayerInfo(i, replace(NEED, window=kind))
        for i, kind in enumerate(kinds)
    ]
    return replace(model(max_length=draw(st.sampled_from([100, 4096, 131072]))), layers=tuple(layers))


@given(
    mixed_models(), st.integers(14, 31), st.integers(0, 999), st.integers(1, 4096), st.none() | st.integers(1, 131072),
    st.sampled_from([1, 16, 64]), st.booleans(), st.booleans(), st.integers(1, 256),
)  # fmt: skip
def test_what_suffices_for_one_request_is_enough(
    info: ModelInfo, bits: int, more: int, max_tokens: int, asked: int | None, block_size: int, user: bool,
    prefix_cache: bool, max_rows: int,
) -> None:  # fmt: skip
    """With the memory of one row an engine starts, and every row up to the length that it promises has room in each
    group. Without, the refusal says how much is needed, and that is more than there is."""
    budget = (1 << bits) + more * 1024
    memory = str(budget) if user else "auto"
    config = EngineConfig(
        cache=CacheConfig(memory=memory, prefix_cache=prefix_cache), model=ModelConfig(max_length=asked),
        sched=SchedConfig(max_rows=max_rows),
    )  # fmt: skip
    available = facts(info, 2 * budget if user else budget, block_size)
    least = asked or min(info.max_length, 256)

    def row(length: int) -> int:
        return sum(s.bytes_per_block * (1 + blocks_needed(s, length, max_tokens)) for s in available.kv_specs)

    if row(least) > budget:
        with pytest.raises(CapacityError, match=f"one request of {least} tokens needs"):
            plan_kv(available, config, max_length=info.max_length, max_tokens=max_tokens)
        return
    kv = plan_kv(available, config, max_length=info.max_length, max_tokens=max_tokens)
    assert kv.nbytes <= budget
    length = fit_length(info, kv, max_tokens, asked)
    assert length >= least
    for spec, num in zip(kv.specs, kv.num_blocks, strict=True):
        assert num - 1 >= blocks_needed(spec, length, max_tokens), spec
    if row(info.max_length) <= budget and not any(spec.recurrent for spec in kv.specs):
        assert length == (asked or info.max_length)


def test_windows_beside_full_attention_with_little_memory() -> None:
    """Windows and full attention in turn, as many models of today have them: a few tokens of all are enough."""
    need = AttnNeed(head_dim=64, num_q_heads=64, num_kv_heads=8)
    layers = tuple(LayerInfo(i, replace(need, window=(128, None)[i % 2])) for i in range(24))
    info = replace(model(max_length=131072), layers=layers)
    config = EngineConfig(cache=CacheConfig(memory="32MiB"))
    kv = plan_kv(facts(info, GIB), config, max_length=info.max_length, max_tokens=64)
    assert (32 << 20) - 2 * kv.specs[0].bytes_per_block < kv.nbytes <= 32 << 20
    assert 256 <= fit_length(info, kv, 64) < 131072


@pytest.mark.parametrize("less", [1, 100, 1 << 20])
def test_needed_is_shown_to_be_more_than_available(less: int) -> None:
    """To the byte where rounded sizes would read alike."""
    specs = model().kv_specs(16, "bfloat16")
    needed = 17 * specs[0].bytes_per_block
    with pytest.raises(CapacityError) as e:
        plan_kv(WorkerFacts(needed - less, 0, 0, tuple(specs)), EngineConfig(), max_length=32768)
    first, second = re.findall(r"[\d.]+ \w+(?= of KV| are)", e.value.message)
    assert first != second
    assert less > 1000 or (first, second) == (f"{needed} bytes", f"{needed - less} bytes")


def test_too_few_blocks_are_counted_in_blocks() -> None:
    config = EngineConfig(cache=CacheConfig(num_blocks=16))
    with pytest.raises(CapacityError, match=r"256 tokens needs 17 blocks.*num_blocks = 16") as e:
        plan_kv(facts(model(), GIB), config, max_length=32768)
    assert "17" in e.value.fix


def test_length_is_what_the_cache_holds() -> None:
    info = model()
    specs = tuple(info.kv_specs(16, "bfloat16"))
    assert fit_length(info, KVConfig(specs, (11,)), 64) == 160
    assert fit_length(info, KVConfig(specs, (10_000,)), 64) == 32768
    assert fit_length(info, KVConfig(specs, (11,)), 64, 100) == 100


def test_step_budget_is_honoured() -> None:
    assert step_tokens(EngineConfig(sched=SchedConfig(max_tokens=16))) == 16


def test_activations_grow_with_tokens_rows_and_vocabulary() -> None:
    info = model()
    base = activation_bytes(info, "bfloat16", 512, 8)
    assert activation_bytes(info, "bfloat16", 1024, 8) > base
    assert activation_bytes(info, "bfloat16", 512, 16) - base == 8 * 151936 * 14
    assert activation_bytes(info, "float32", 512, 8) > base


def test_adapters_have_room() -> None:
    """Columns of A and rows of B: of the query alone, of query and key, which share an input, and of the embedding."""
    qkv = LinearSpec("layers.0.qkv", 8, (16, 4, 4), parts=("q", "k", "v"), sources=("a.q", "a.k", "a.v"))
    down = LinearSpec("layers.0.down", 32, (8,), sources=("a.down",))
    one = replace(model(), linears=(qkv, down), adapter_targets=("q",), embedding="")
    many = EngineConfig(lora=LoraConfig(enabled=True, max_adapters=3, max_rank=4))
    two = EngineConfig(lora=LoraConfig(modules="x=/x,y=/y", max_rank=4))
    assert adapter_bytes(one, EngineConfig(), "bfloat16") == 0
    assert adapter_bytes(one, many, "bfloat16") == 3 * 4 * (8 + 16) * 2
    assert adapter_bytes(one, two, "float32") == 2 * 4 * (8 + 16) * 4
    both = replace(one, adapter_targets=("q", "k"))
    assert adapter_bytes(both, many, "bfloat16") == 3 * 4 * (8 + 16 + 8 + 4) * 2
    whole = replace(one, embedding="embed")
    assert adapter_bytes(whole, many, "bfloat16") == 3 * 4 * (8 + 16 + one.vocab_size + one.hidden_size) * 2
    device = DeviceInfo("some", "cpu", total_memory=16 * GIB, free_memory=8 * GIB, dtypes=("bfloat16",))
    with_room, without = (estimate(whole, config, device) for config in (many, EngineConfig()))
    assert with_room.activation_bytes - without.activation_bytes == adapter_bytes(whole, many, "bfloat16")


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
    one_of_two = estimate(info, EngineConfig(parallel=ParallelConfig(dp=2)), device)  # they share the host's memory
    assert one_of_two.weight_bytes == found.weight_bytes
    assert one_of_two.weight_bytes + one_of_two.activation_bytes + one_of_two.kv_bytes <= 4 * GIB


def test_estimate_refuses_what_cannot_fit() -> None:
    device = DeviceInfo("some", "cpu", total_memory=GIB // 2, dtypes=("bfloat16",))
    with pytest.raises(CapacityError, match="weights"):
        estimate(model(), EngineConfig(), device)
