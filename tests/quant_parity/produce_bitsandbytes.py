"""Checkpoints of transformers with bitsandbytes: `python produce_bitsandbytes.py FOLDER [NAME ...]`, in an environment
that has both.

Each is a tiny Llama with what its producer makes of it: `expected.safetensors` holds token ids and the logits of
transformers over the weights that the producer's own dequantization gives, and one of these weights, all float32;
`plain` is what the producer rounded to it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant
from safetensors.torch import save_file
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

VOCABULARY = 64
WEIGHT = "model.layers.0.mlp.down_proj"
SETTINGS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4_nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "nf4_bfloat16": {
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_storage": torch.bfloat16, "bnb_4bit_compute_dtype": torch.bfloat16,
        "llm_int8_skip_modules": ["lm_head", "o_proj"],
    },
    "nf4_odd": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "llm_int8_skip_modules": []},
    "int8": {"load_in_8bit": True},
}  # fmt: skip


def plain(folder: Path, hidden: int, intermediate: int) -> Path:
    """The model that is quantized."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def dequantized(module: torch.nn.Module) -> torch.Tensor:
    """[out, in] float32 by the producer."""
    weight = module.weight
    if isinstance(module, bnb.nn.Linear8bitLt):
        scales = module.state.SCB if module.state.SCB is not None else weight.SCB
        return int8_vectorwise_dequant(weight.data, scales).float()
    weight.quant_state.dtype = torch.float32
    return dequantize_4bit(weight.data, weight.quant_state)


def expected(folder: Path, source: Path) -> dict[str, torch.Tensor]:
    """Logits by the producer's own weights."""
    reference = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    quantized = LlamaForCausalLM.from_pretrained(folder, device_map="cpu")
    plain = reference.get_submodule(WEIGHT).weight.detach().bfloat16()
    for name, module in quantized.named_modules():
        if isinstance(module, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt):
            reference.get_submodule(name).weight.data = dequantized(module)
    tokens = torch.tensor([[(7 * i + 3) % VOCABULARY for i in range(40)]])
    weight = reference.get_submodule(WEIGHT).weight.detach().clone()
    with torch.no_grad():
        logits = reference(tokens).logits[0].contiguous()
    return {"tokens": tokens, "logits": logits, WEIGHT: weight, "plain": plain}


def main(target: Path, names: list[str]) -> None:
    for name, settings in SETTINGS.items():
        if names and name not in names:
            continue
        sizes = (72, 120) if name == "nf4_odd" else (64, 128)  # blocks that end within rows
        source = plain(target / f"plain_{sizes[0]}", *sizes)
        config = BitsAndBytesConfig(**settings)
        model = LlamaForCausalLM.from_pretrained(source, quantization_config=config, device_map="cpu")
        model.save_pretrained(target / name)
        save_file(expected(target / name, source), target / name / "expected.safetensors")
        print("made", name, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
