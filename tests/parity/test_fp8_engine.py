"""A float8 checkpoint through the resolver and the whole engine: found by what the checkpoint says, equal to the same
weights stored dequantized."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lmkit import LLM, SamplingParams
from lmkit_testing.checkpoints import byte_tokenizer, tiny_checkpoint
from safetensors.torch import load_file, save_file

SIZES = {"vocab_size": 259, "hidden_size": 64, "intermediate_size": 128, "eos_token_id": None}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
FAMILIES = {"qwen3": SIZES, "Qwen3MoeForCausalLM": SIZES | MIXTURE}
BLOCK = 32


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8 weight, scales) by blocks, as the published format has them."""
    tiles = weight.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scales = tiles.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    stored = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return stored.flatten(2).flatten(0, 1), scales


def write_pair(family: str, plain: Path, quantized: Path) -> None:
    tiny_checkpoint(family, plain, **FAMILIES[family])
    config = json.loads((plain / "config.json").read_text())
    stored, back = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if "_proj.weight" in name:
            weight, scales = quantize(tensor)
            stored |= {name: weight, f"{name}_scale_inv": scales}
            spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            back[name] = weight.float() * spread
        else:
            stored[name] = back[name] = tensor
    save_file(back, plain / "model.safetensors")
    quantized.mkdir()
    save_file(stored, quantized / "model.safetensors")
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
    }
    (quantized / "config.json").write_text(json.dumps(config))
    for directory in (plain, quantized):
        byte_tokenizer(directory)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_those_of_the_dequantized_weights(family: str, tmp_path: Path) -> None:
    write_pair(family, tmp_path / "plain", tmp_path / "fp8")
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = ["a", "some longer prompt than that", "third"]
    outputs = {}
    for name in ("plain", "fp8"):
        # pinned: the other kernel rounds activations, too
        op = "fp8_weights" if name == "fp8" else "auto"
        with LLM(str(tmp_path / name), dtype="float32", num_blocks=64, op=op) as llm:
            outputs[name] = [o.token_ids for o in llm.generate(prompts, params, progress=False)]
            chosen = {(c.kind, c.component): c.name for c in reversed(llm.resolved.choices)}
            assert chosen.get(("quantization", "")) == ("fp8" if name == "fp8" else None)
    assert chosen["op", "linear:fp8"] == "fp8_weights"
    assert outputs["fp8"] == outputs["plain"]
