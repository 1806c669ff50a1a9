"""A mixture whose experts are packed integers: each expert has its own tensors, the router none."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lmkit.api import CheckpointError
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.model import choice, deviation, drift, load_tiny, prompt, reference
from lmkit_testing.produced import INTEGER, REFERENCE
from lmkit_testing.steps import ModelDriver, Ranks
from lmkit_worker.loaded import LoadedModel
from safetensors.torch import load_file, save_file
from torch import Tensor

SCHEME = "lmkit_quantization_compressed_tensors.scheme:CompressedTensorsScheme"
QWEN = "lmkit_model_qwen.arch:Qwen"
SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16,
    "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
}  # fmt: skip
GROUP = 32
CONFIG = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP},
    }},
}  # fmt: skip


def words(codes: Tensor) -> Tensor:
    """Codes [n, k] of 4 bits -> int32 [n, k / 8], the first in the lowest bits."""
    shifts = torch.arange(0, 32, 4)
    return (codes.long().unflatten(1, (-1, 8)) << shifts).sum(-1).to(torch.int32)


def store(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What a checkpoint has of `weight`, and what it is worth."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round().clamp(0, 15)
    codes = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, 15)
    tensors = {
        "weight_packed": words(codes.flatten(1)), "weight_scale": scales,
        "weight_zero_point": words(zeros.T).T.contiguous(), "weight_shape": torch.tensor(weight.shape),
    }  # fmt: skip
    return tensors, ((codes - zeros[..., None]) * scales[..., None]).flatten(1)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(quantized, dequantized)"""
    pytest.importorskip("lmkit_model_qwen")
    plain = tiny_checkpoint("Qwen3MoeForCausalLM", tmp_path_factory.mktemp("plain"), **SIZES)
    quantized = tmp_path_factory.mktemp("quantized")
    stored: dict[str, Tensor] = {}
    worth: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        stored[name] = worth[name] = tensor
        if name.endswith("_proj.weight"):
            tensors, worth[name] = store(stored.pop(name).float())
            stored |= {name.removesuffix("weight") + key: value for key, value in tensors.items()}
    save_file(worth, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))
    return quantized, plain


@pytest.fixture(scope="module")
def expected(checkpoints: tuple[Path, Path]) -> Tensor:
    with torch.no_grad():
        return reference(checkpoints[1], "float32")(torch.tensor([prompt(97)])).logits[0]


def load(folder: Path, **options: Any) -> LoadedModel:
    return load_tiny(
        folder,
        QWEN,
        "float32",
        choices=(choice("quantization", SCHEME), choice("op", REFERENCE, "linear:int4")),
        **options,
    )


def test_experts_equal_what_their_codes_are_worth(checkpoints: tuple[Path, Path], expected: Tensor) -> None:
    assert deviation(ModelDriver(load(checkpoints[0]), "float32").run(0, prompt(97), 7), expected) < 1e-4


@pytest.mark.parametrize("deals", [1, 2])
def test_two_ranks_equal_one(checkpoints: tuple[Path, Path], expected: Tensor, deals: int) -> None:
    for logits in Ranks(2).logits(partial(load, checkpoints[0], deals=deals), prompt(97)):
        assert deviation(logits, expected) < 1e-4


def test_native_experts_run_them(checkpoints: tuple[Path, Path], expected: Tensor) -> None:
    """All experts in one operator, on their integers: each token as by one expert after the other.

    Against the weights the median token is compared: activations are rounded to 8 bits, and one token of these is
    so near to another expert that its router then chooses that (0.18 there, at most 0.06 elsewhere).
    """
    experts = choice("op", "lmkit_platform_cpu.experts:NativeExperts", "moe:int4")
    chosen = (choice("quantization", SCHEME), choice("op", INTEGER, "linear:int4"))
    native, linear = (load_tiny(checkpoints[0], QWEN, "float32", choices=chosen + more) for more in ((experts,), ()))
    got = ModelDriver(native, "float32").run(0, prompt(97), 7)
    assert deviation(got, ModelDriver(linear, "float32").run(0, prompt(97), 7)) < 1e-4
    assert drift(got, expected) < 8e-2
    packed = native.model.layers[1].mlp.experts.up.packed
    assert packed.nbytes < SIZES["num_experts"] * 2 * SIZES["moe_intermediate_size"] * SIZES["hidden_size"]


def test_a_shape_of_another_layer_is_refused(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = load_file(checkpoints[0] / "model.safetensors")
    tensors["model.layers.1.mlp.experts.2.up_proj.weight_shape"] = torch.tensor([64, 128])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((checkpoints[0] / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.up: weight_shape"):
        load(tmp_path)
