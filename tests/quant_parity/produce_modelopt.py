"""Checkpoints quantized by ModelOpt: `python produce_modelopt.py FOLDER [NAME ...]`, in an environment that has it.

Each is a tiny Llama as `export_hf_checkpoint` writes it; `expected.safetensors` holds token ids and the logits of
transformers over the weights that the producer's own tensors give. Both are float32. `rounded`, where all is in
float8, are the logits with activations rounded by the producer's own function.
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
from modelopt.torch.quantization.tensor_quant import fp8_eager
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 32


def mixed() -> dict[str, Any]:
    """Attention in float8, but for its output, and the rest in NVFP4."""
    found = copy.deepcopy(mtq.NVFP4_MLP_ONLY_CFG)
    found["quant_cfg"] += [
        {"quantizer_name": f"*self_attn.{name}_proj.{kind}_quantizer", "cfg": {"num_bits": (4, 3), "axis": None}}
        for name in "qkv"
        for kind in ("weight", "input")
    ]
    return found


def float8() -> dict[str, Any]:
    """Everything in float8, the cache too."""
    found = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
    found["quant_cfg"] += copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])
    return found


MADE: dict[str, Any] = {
    "modelopt_fp8": float8(),
    "modelopt_mixed": mixed(),
    "modelopt_nvfp4": mtq.NVFP4_DEFAULT_CFG,
    "modelopt_nvfp4_mlp": mtq.NVFP4_MLP_ONLY_CFG,
    "modelopt_nvfp4_weights": mtq.W4A16_NVFP4_CFG,
}


def plain() -> LlamaForCausalLM:
    """The model that is quantized."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        initializer_range=0.2, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    return LlamaForCausalLM(config)


def dequantized(name: str, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weight of a module in float32."""
    weight, scale = stored[f"{name}.weight"], stored[f"{name}.weight_scale"]
    whole = stored.get(f"{name}.weight_scale_2")
    if whole is None:
        return FP8QTensor(weight.shape, torch.float32, weight).dequantize(torch.float32, scale=scale)
    shape = torch.Size((weight.shape[0], 2 * weight.shape[1]))
    own = NVFP4QTensor(shape, torch.float32, weight)
    return own.dequantize(torch.float32, scale=scale, double_scale=whole, block_sizes={-1: 16})


def expected(folder: Path) -> dict[str, torch.Tensor]:
    """Logits by the weights of a checkpoint."""
    stored = load_file(folder / "model.safetensors")
    reference = plain()
    weights = {key: value.float() for key, value in stored.items() if key in reference.state_dict()}
    quantized = [key.removesuffix(".weight_scale") for key in stored if key.endswith(".weight_scale")]
    weights |= {f"{name}.weight": dequantized(name, stored) for name in quantized}
    reference.load_state_dict(weights)
    tokens = torch.tensor([[(7 * i + 3) % VOCABULARY for i in range(40)]])
    with torch.no_grad():
        found = {"tokens": tokens, "logits": reference(tokens).logits[0].contiguous()}
        if all(stored[f"{name}.weight"].dtype == torch.float8_e4m3fn for name in quantized):
            for name in quantized:
                largest = stored[f"{name}.input_scale"].float() * torch.finfo(torch.float8_e4m3fn).max
                hook = partial(rounded, largest)
                reference.get_submodule(name).register_forward_pre_hook(hook)
            found["rounded"] = reference(tokens).logits[0].contiguous()
    return found


def rounded(largest: torch.Tensor, _: torch.nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """A hook before a linear: its input through float8 and back."""
    return (fp8_eager(given[0], largest),)


def main(target: Path, names: list[str]) -> None:
    torch.manual_seed(1)
    samples = torch.randint(3, VOCABULARY, (16, 64))
    for name, config in MADE.items():
        if names and name not in names:
            continue
        model = mtq.quantize(plain().bfloat16(), copy.deepcopy(config), lambda model, samples=samples: model(samples))
        export_hf_checkpoint(model, export_dir=target / name)
        save_file(expected(target / name), target / name / "expected.safetensors")
        print("made", name, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
