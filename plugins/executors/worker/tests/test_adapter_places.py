"""Adapters of layers that read the keys and values of another one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lmkit.api import AttnNeed, LayerInfo, LinearSpec, ModelInfo, WeightMismatch
from lmkit_worker.loading.adapter import open_adapter
from safetensors.torch import save_file

NEED = AttnNeed(4, 2, 1)
MODULE = "model.layers.{}.self_attn.{}"


def qkv(layer: int, sizes: dict[str, int]) -> LinearSpec:
    sources = tuple(MODULE.format(layer, name) for name in sizes)
    return LinearSpec(f"layers.{layer}.attn.qkv", 8, tuple(sizes.values()), parts=tuple(sizes), sources=sources)


INFO = ModelInfo(
    "Tiny", 16, 8, (LayerInfo(0, NEED), LayerInfo(1, NEED, kv_of=0)), 64, "float32", 0,
    linears=(qkv(0, {"q_proj": 8, "k_proj": 4, "v_proj": 4}), qkv(1, {"q_proj": 8})),
    adapter_targets=("q_proj", "k_proj", "v_proj"),
)  # fmt: skip


def adapter(folder: Path, layer: int, name: str, out: int) -> Path:
    module = f"base_model.model.{MODULE.format(layer, name)}"
    save_file(
        {f"{module}.lora_A.weight": torch.zeros(2, 8), f"{module}.lora_B.weight": torch.zeros(out, 2)},
        folder / "adapter_model.safetensors",
    )
    (folder / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 2}))
    return folder


@pytest.mark.parametrize("name", ["k_proj", "v_proj"])
def test_a_layer_without_keys_has_no_adapter_for_them(tmp_path: Path, name: str) -> None:
    assert open_adapter(adapter(tmp_path, 0, name, 4), INFO, 16).entries
    with pytest.raises(WeightMismatch, match=rf"layer 1 has none .* keys and values of model\.layers\.0\..*{name}"):
        open_adapter(adapter(tmp_path, 1, name, 4), INFO, 16)


def test_its_queries_have_one(tmp_path: Path) -> None:
    assert open_adapter(adapter(tmp_path, 1, "q_proj", 8), INFO, 16).entries
