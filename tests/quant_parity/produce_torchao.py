"""Checkpoints of transformers with torchao: `python produce_torchao.py FOLDER [NAME ...]`, in an environment that has
both.

Each is a tiny Llama; `expected.safetensors` holds token ids and the logits of transformers over the weights that the
producer's own dequantization gives, both float32. torchao asks for a GPU before it makes float8 for rounded
activations, and takes two functions for integers of 4 bits from a library for GPUs: these stand here, and what
they give is dequantized by torchao's own arithmetic.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    FqnToConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerAxis,
    PerGroup,
    PerRow,
    PerTensor,
    quant_api,
)
from torchao.quantization.quant_primitives import _dequantize_affine_tinygemm
from torchao.quantization.quantize_.workflows.int4 import int4_tensor
from transformers import LlamaConfig, LlamaForCausalLM, TorchAoConfig

VOCABULARY = 32
FOUR = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
MIXED = {
    "model.layers.0.self_attn.o_proj": None,
    "re:.*self_attn.*": IntxWeightOnlyConfig(torch.int8, PerAxis(0), MappingType.ASYMMETRIC),
    "model.embed_tokens": IntxWeightOnlyConfig(torch.int8, PerGroup(32)),
    "_default": FOUR,
}
SETTINGS = {
    "int8_groups": {"quant_type": Int8WeightOnlyConfig(granularity=PerGroup(32)), "modules_to_not_convert": []},
    "int8_activations": {"quant_type": Int8DynamicActivationInt8WeightConfig()},
    "float8_tensor": {"quant_type": Float8WeightOnlyConfig(granularity=PerTensor())},
    "float8_activations": {"quant_type": Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())},
    "intx": {"quant_type": IntxWeightOnlyConfig(torch.int4, PerGroup(32), MappingType.ASYMMETRIC)},
    "int4": {"quant_type": Int4WeightOnlyConfig(group_size=32)},
    "mixed": {"quant_type": FqnToConfig(MIXED), "include_input_output_embeddings": True},
}  # fmt: skip


def plain(folder: Path) -> Path:
    """The model that is quantized."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def round_rows(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `int4_row_quantize_zp` of mslk gives: -8 to 7 int8 [n, k], scales and zeros [k / group, n] float32."""
    groups = weight.float().unflatten(1, (-1, group))
    low = groups.amin(2)
    scales = (groups.amax(2) - low).clamp(min=1e-6) / 15
    codes = ((groups - low[..., None]) / scales[..., None]).round().clamp(0, 15) - 8
    return codes.flatten(1).to(torch.int8), scales.t().contiguous(), (low + 8 * scales).t().contiguous()


def pack(codes: torch.Tensor) -> torch.Tensor:
    """What `pack_int4` of mslk gives: two of a row in an int8, the first in the low bits."""
    return (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] float32 by the producer."""
    if isinstance(weight, int4_tensor.Int4Tensor):
        codes = torch.stack([weight.qdata & 15, (weight.qdata >> 4) & 15], -1).flatten(1) ^ 8
        scales, zeros = (each.float().t().contiguous() for each in (weight.scale, weight.zero_point))
        return _dequantize_affine_tinygemm(codes.int(), weight.block_size, scales, zeros, torch.int32, 0, 15)
    if hasattr(weight, "activation_quantization"):
        weight = weight.to(torch.float32)
        return weight.dequantize()
    return weight.dequantize(torch.float32)


def expected(folder: Path, source: Path) -> dict[str, torch.Tensor]:
    """Logits by the producer's own weights."""
    reference = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    quantized = LlamaForCausalLM.from_pretrained(folder, device_map="cpu")
    for name, parameter in quantized.named_parameters():
        if type(parameter.data) is not torch.Tensor:
            module, _, key = name.rpartition(".")
            setattr(reference.get_submodule(module), key, torch.nn.Parameter(dequantized(parameter.data)))
    tokens = torch.tensor([[(7 * i + 3) % VOCABULARY for i in range(40)]])
    with torch.no_grad():
        return {"tokens": tokens, "logits": reference(tokens).logits[0].contiguous()}


def main(target: Path, names: list[str]) -> None:
    int4_tensor.int4_row_quantize_zp, int4_tensor.pack_int4 = round_rows, pack
    quant_api._check_hardware_support = lambda granularity: None
    source = plain(target / "plain")
    for name, settings in SETTINGS.items():
        if names and name not in names:
            continue
        config = TorchAoConfig(**settings)
        model = LlamaForCausalLM.from_pretrained(source, quantization_config=config, device_map="cpu")
        model.save_pretrained(target / name)
        save_file(expected(target / name, source), target / name / "expected.safetensors")
        print("made", name, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
