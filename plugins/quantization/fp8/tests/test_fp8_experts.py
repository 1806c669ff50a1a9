"""Mixtures whose experts are stored in float8, written and read by the producer's own code, in each form of scales."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmkit_quantization_fp8.kernel import Fp8Weight
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.model import choice, deviation, load_tiny, prompt, reference
from lmkit_testing.steps import ModelDriver, Ranks
from lmkit_worker.loaded import LoadedModel
from safetensors.torch import load_file, save_file

TARGET = "lmkit_quantization_fp8.scheme:Fp8Scheme"
KERNELS = {"fp8": "lmkit_quantization_fp8.kernel:Fp8Weights", "reference": "lmkit_layers.linear:ReferenceLinear"}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_attention_heads": 4}
LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1,
}  # fmt: skip
# architecture -> (plugin's target, configuration): experts alone, beside a shared one, beside a weighted one
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3MoeForCausalLM": (
        "lmkit_model_qwen.arch:Qwen",
        {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "norm_topk_prob": True},
    ),
    "DeepseekV3ForCausalLM": ("lmkit_model_deepseek.arch:Deepseek", LATENT),
    "Qwen2MoeForCausalLM": (
        "lmkit_model_qwen.arch:Qwen",
        {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 48},
    ),
    "MiniMaxM2ForCausalLM": (
        "lmkit_model_minimax.arch:Minimax",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "intermediate_size": 32},
    ),
}
BLOCKS = {"tensor": None, "channel": (1, 128), "block": (16, 16)}
KEPT = ("embed_tokens", "lm_head", "mlp.gate.", "block_sparse_moe.gate.", "shared_expert_gate")


def quantize(directory: Path, form: str) -> None:
    """The checkpoint in `directory` as the producer's quantizer stores it."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    from transformers import FineGrainedFP8Config

    config = FineGrainedFP8Config(weight_block_size=BLOCKS[form])
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if tensor.dim() < 2 or any(part in name for part in KEPT):
            stored[name] = tensor
            continue
        block = (1, tensor.shape[1]) if form == "channel" else BLOCKS[form]  # of a narrow layer: all its columns
        made = fp8.Fp8Quantize(SimpleNamespace(quantization_config=FineGrainedFP8Config(weight_block_size=block)))
        tensors = made._quantize_one(name, tensor)
        assert len(tensors) == 2, f"{name} {list(tensor.shape)} was left as it is"
        if form == "tensor":
            tensors[f"{name}_scale_inv"] = tensors[f"{name}_scale_inv"].reshape(())
        stored |= tensors
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    described = json.loads((directory / "config.json").read_text())
    described["quantization_config"] = json.loads(json.dumps(config.to_dict()))
    (directory / "config.json").write_text(json.dumps(described))


@pytest.fixture(scope="module", params=MIXTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=BLOCKS)
def directory(request: pytest.FixtureRequest, architecture: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_checkpoint(architecture, tmp_path_factory.mktemp("fp8"), **SIZES | MIXTURES[architecture][1])
    quantize(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def expected(directory: Path) -> torch.Tensor:
    """Logits by the producer's reader, which dequantizes where it has no kernel."""
    with torch.no_grad():
        return reference(directory, "float32")(torch.tensor([prompt(97)])).logits[0]


def load(architecture: str, directory: Path, kernel: str, **options: Any) -> LoadedModel:
    target = MIXTURES[architecture][0]
    pytest.importorskip(target.partition(".")[0])
    chosen = (choice("quantization", TARGET), choice("op", KERNELS[kernel], "linear:fp8"))
    return load_tiny(directory, target, "float32", choices=chosen, **options)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kernel", KERNELS)
def test_experts_equal_those_of_the_producer(
    architecture: str, directory: Path, expected: torch.Tensor, kernel: str
) -> None:
    loaded = load(architecture, directory, kernel)
    assert deviation(ModelDriver(loaded, "float32").run(0, prompt(97), 7), expected) < 1e-4
    if kernel == "fp8":  # nothing was widened
        packed = loaded.model.layers[1].mlp.experts.up.packed
        assert all(isinstance(one, Fp8Weight) and one.weight.element_size() == 1 for one in packed.experts)


@pytest.mark.parametrize("deals", [1, 2])
def test_two_ranks_equal_one(architecture: str, directory: Path, expected: torch.Tensor, deals: int) -> None:
    """Scales follow their rows and columns, or the split is refused."""
    from lmkit.api import CannotSplit

    try:
        ranks = Ranks(2).logits(partial(load, architecture, directory, "fp8", deals=deals), prompt(97))
    except CannotSplit as refusal:
        assert "cannot be split" in refusal.message or "straddle" in refusal.message  # noqa: PT017
        return
    for logits in ranks:
        assert deviation(logits, expected) < 1e-4
