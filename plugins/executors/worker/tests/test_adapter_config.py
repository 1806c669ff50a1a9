"""adapter_config.json: every key of PEFT is understood, harmless, or refused as soon as it says something."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from lmkit.api import UnsupportedModel
from lmkit_worker.loading.adapter_config import FIXED, HARMLESS, UNDERSTOOD, AdapterConfig

KNOWN = {*FIXED, *UNDERSTOOD, *HARMLESS}


def test_what_peft_writes_by_default_is_taken() -> None:
    peft = pytest.importorskip("peft")
    config = AdapterConfig({**peft.LoraConfig().to_dict(), "peft_type": "LORA", "task_type": "CAUSAL_LM"}, 16)
    assert (config.rank("q_proj"), config.scale("q_proj")) == (8, 1.0)


def test_every_field_of_the_library_is_known_or_refused() -> None:
    peft = pytest.importorskip("peft")
    for field in fields(peft.LoraConfig):
        if field.name not in KNOWN:
            for value in ({"a": 1}, True, 3, "x", [0]):
                with pytest.raises(UnsupportedModel, match=field.name):
                    AdapterConfig({field.name: value}, 16)


@pytest.mark.parametrize("key", ["use_of_next_year", "lora_gamma", "x" * 10_000, "R", "lora_alpha "])
def test_a_new_key_is_refused_when_it_says_something(key: str) -> None:
    for value in (None, False, [], {}, ""):
        assert AdapterConfig({key: value}, 16).scale("q_proj") == 1.0
    for value in (True, 0, 1, 0.5, "yes", [False], {"a": None}, {"a": 10**400}):
        with pytest.raises(UnsupportedModel) as caught:
            AdapterConfig({key: value}, 16)
        assert key[:80] in str(caught.value)
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "changes",
    [
        {"init_lora_weights": name}
        for name in ("pissa", "pissa_niter_16", "PiSSA", "olora", "OLoRA", "loftq", "corda", "lora_ga", "new", 1, ["x"])
    ]
    + [
        {"bias": "all"}, {"bias": "lora_only"}, {"lora_bias": True}, {"use_qalora": True}, {"use_rslora": 1},
        {"layer_replication": [[0, 2]]}, {"trainable_token_indices": [3]}, {"alora_invocation_tokens": [1]},
        {"arrow_config": {"top_k": 2}}, {"megatron_config": {"a": 1}}, {"peft_type": "LOHA"}, {"peft_type": None},
        {"kasa_config": {"beta": 1e-4}}, {"use_bdlora": {"nblocks": 2}}, {"monteclora_config": {"num_samples": 2}},
        {"velora_config": {"scale": 2.0}}, {"ensure_weight_tying": True},
        {"target_modules": 3}, {"target_modules": [3]}, {"target_modules": "("}, {"exclude_modules": {"a": 1}},
        {"layers_to_transform": "0"}, {"layers_to_transform": [True]},
        {"layers_pattern": [3], "layers_to_transform": 0}, {"layers_pattern": "(", "layers_to_transform": 0},
        {"target_modules": ".*q", "layers_to_transform": 0}, {"target_parameters": "experts"},
    ],
    ids=str,
)  # fmt: skip
def test_what_changes_the_arithmetic_in_another_way_is_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        AdapterConfig(changes, 16)
    assert any(key in str(caught.value) for key in changes)


@pytest.mark.parametrize("name", [True, False, "gaussian", "orthogonal", "eva", "mica", None])
def test_other_initializations_leave_the_base_alone(name: object) -> None:
    assert AdapterConfig({"init_lora_weights": name, "r": 4}, 16).rank("q_proj") == 4


PLACES = [
    f"model.layers.{i}.{m}" for i in (0, 1, 11) for m in ("self_attn.q_proj", "mlp.up_proj", "mlp.experts.1.up_proj")
]
TARGETS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj"]}, {"target_modules": ["model.layers.0.mlp.up_proj", "experts.1.up_proj"]},
    {"target_modules": r".*\.(q|up)_proj"}, {"target_modules": r"layers\.0\..*"},
    {"target_modules": r".*experts\.\d+\..*"},
    {"target_modules": ["q_proj", "up_proj"], "exclude_modules": ["mlp.up_proj"]},
    {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*\.1\..*"},
    {"target_modules": ["up_proj"], "layers_to_transform": 1},
    {"target_modules": ["up_proj"], "layers_to_transform": []},
    {"target_modules": ["up_proj", "model.layers.0.mlp.up_proj"], "layers_to_transform": [1, 11]},
    {"target_modules": ["up_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    {"target_modules": ["up_proj"], "layers_to_transform": [1], "layers_pattern": ["experts", "layers"]},
    {"target_modules": ["up_proj"], "layers_to_transform": [1], "layers_pattern": ["h"]},
    {"target_modules": ["proj"]}, {"target_modules": []},
]  # fmt: skip


@pytest.mark.parametrize("said", TARGETS, ids=str)
def test_targets_are_those_of_the_library(said: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    utils = pytest.importorskip("peft.tuners.tuners_utils")
    theirs = peft.LoraConfig(**said)
    ours = AdapterConfig({**said, "target_parameters": ["x"]}, 16).targets
    for module in PLACES:
        found = utils.check_target_module_exists(theirs, module)
        included = bool(found) and type(found).__name__ != "_ExcludedModule"
        assert ours.include(module) == included, module
