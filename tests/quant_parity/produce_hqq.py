"""Checkpoints of HQQ: `python produce_hqq.py FOLDER [NAME ...]`, in an environment that has it.

Each is a tiny Llama whose linears are HQQ's. The tensors are those of these modules, and config.json has what
`HqqConfig` says, as transformers saved such models until version 5, which does not. `expected.safetensors` holds token
ids and the logits of transformers over the weights that the producer's own dequantization gives, both float32.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from hqq.core.quantize import HQQLinear, Quantizer
from safetensors.torch import save_file
from transformers import HqqConfig, LlamaConfig, LlamaForCausalLM

VOCABULARY = 32
MIXED = {"self_attn.q_proj": 8, "self_attn.k_proj": 8, "self_attn.v_proj": 8, "mlp.gate_proj": 3, "mlp.up_proj": 3}
SETTINGS: dict[str, dict[str, Any]] = {
    "bits8": {"nbits": 8, "group_size": 64},
    "bits4": {"nbits": 4, "group_size": 32},
    "bits4_rows": {"nbits": 4, "group_size": None, "skip_modules": [], "view_as_float": True},
    "bits3": {"nbits": 3, "group_size": 32},
    "bits2": {"nbits": 2, "group_size": 16},
    "mixed": {"dynamic_config": {name: {"nbits": bits, "group_size": 32} for name, bits in MIXED.items()}},
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


def quantize(model: LlamaForCausalLM, config: HqqConfig) -> dict[str, torch.Tensor]:
    """Replaces the linears that the configuration names; their weights in float32, by the producer."""
    worth, said = {}, config.quant_config
    for name, module in list(model.named_modules()):
        tag = ".".join(part for part in name.split(".") if part not in ("model", "layers") and not part.isnumeric())
        settings = said if "weight_quant_params" in said else said.get(tag)
        if not isinstance(module, torch.nn.Linear) or tag in config.skip_modules or settings is None:
            continue
        made = HQQLinear(module, settings, compute_dtype=torch.bfloat16, device="cpu")
        model.set_submodule(name, made)
        exact = {key: value.float() if isinstance(value, torch.Tensor) else value for key, value in made.meta.items()}
        worth[f"{name}.weight"] = Quantizer.dequantize(made.W_q, exact | {"compute_dtype": torch.float32})
    return worth


def main(target: Path, names: list[str]) -> None:
    for name, settings in SETTINGS.items():
        if names and name not in names:
            continue
        model, config, folder = plain().bfloat16(), HqqConfig(**settings), target / name
        worth = quantize(model, config)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {key: value.contiguous() for key, value in model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        said = model.config.to_dict() | {"dtype": "bfloat16", "quantization_config": config.to_dict()}
        (folder / "config.json").write_text(json.dumps(said, indent=2) + "\n")
        reference = plain()
        reference.load_state_dict({key: value.bfloat16() for key, value in reference.state_dict().items()} | worth)
        tokens = torch.tensor([[(7 * i + 3) % VOCABULARY for i in range(40)]])
        with torch.no_grad():
            logits = reference(tokens).logits[0].contiguous()
        save_file({"tokens": tokens, "logits": logits}, folder / "expected.safetensors")
        print("made", name, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
