"""Checkpoints quantized by AMD Quark: `python produce_quark.py FOLDER [NAME ...]`, in an environment that has it.

Each is a tiny Llama as `export_safetensors` writes it; `expected.safetensors` holds token ids and the logits of
transformers over the weights that the producer's own dequantization of these files gives, both float32.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.export.nn.modules.qparamslinear import QParamsLinear
from quark.torch.quantization.config.config import (
    FP8E4M3PerChannelSpec,
    FP8E4M3PerTensorSpec,
    Int4PerGroupSpec,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    OCP_MXFP4Spec,
    QConfig,
    QLayerConfig,
    Uint4PerGroupSpec,
)
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 32
HEAD = ["lm_head"]


def spec(kind: Any, **settings: object) -> Any:
    return kind(**settings).to_quantization_spec()


MAX = {"observer_method": "min_max", "is_dynamic": False}
FLOAT8 = spec(FP8E4M3PerTensorSpec, **MAX)
TOKENS = spec(FP8E4M3PerChannelSpec, ch_axis=1, is_dynamic=True)
ROWS8 = spec(FP8E4M3PerChannelSpec, ch_axis=0, is_dynamic=False)
INT4 = spec(Int4PerGroupSpec, ch_axis=-1, group_size=32, is_dynamic=False)
UINT4 = spec(Uint4PerGroupSpec, ch_axis=-1, group_size=32, is_dynamic=False)
ROWS = spec(Int8PerChannelSpec, ch_axis=0, is_dynamic=False, symmetric=True)
SCALES = {"scale_type": "float", "round_method": "half_even"}
TENSOR = spec(Int8PerTensorSpec, symmetric=True, **MAX, **SCALES)
MX = spec(OCP_MXFP4Spec, ch_axis=-1, is_dynamic=False)
MX_TOKENS = spec(OCP_MXFP4Spec, ch_axis=-1, is_dynamic=True)
SETTINGS: dict[str, tuple[QConfig, str]] = {
    "fp8": (QConfig(QLayerConfig(weight=FLOAT8, input_tensors=FLOAT8), exclude=HEAD), "reorder"),
    "fp8_rows": (QConfig(QLayerConfig(weight=ROWS8, input_tensors=TOKENS), exclude=HEAD), "reorder"),
    "int8": (QConfig(QLayerConfig(weight=ROWS), exclude=HEAD), "reorder"),
    "int8_tensor": (QConfig(QLayerConfig(weight=TENSOR), exclude=HEAD), "reorder"),
    "int4": (QConfig(QLayerConfig(weight=INT4), exclude=HEAD), "reorder"),
    "int4_order": (QConfig(QLayerConfig(weight=UINT4), exclude=HEAD), "order"),
    "mxfp4": (QConfig(QLayerConfig(weight=MX, input_tensors=MX_TOKENS), exclude=HEAD), "reorder"),
    "mixed": (
        QConfig(
            QLayerConfig(weight=UINT4),
            layer_quant_config={"*self_attn*": QLayerConfig(weight=ROWS8), "*down_proj": QLayerConfig(weight=MX)},
            exclude=["lm_head", "*o_proj"],
        ),
        "reorder",
    ),
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


def expected(folder: Path) -> dict[str, torch.Tensor]:
    """Logits by the weights of a checkpoint."""
    quantized = import_model_from_safetensors(plain(), str(folder))
    reference = plain()
    weights = {key: value.bfloat16() for key, value in reference.state_dict().items()}
    for name, module in quantized.named_modules():
        if isinstance(module, QParamsLinear):
            quantizer = module.weight_quantizer
            weights[f"{name}.weight"] = quantizer(module.weight)
    reference.load_state_dict(weights)
    tokens = torch.tensor([[(7 * i + 3) % VOCABULARY for i in range(40)]])
    with torch.no_grad():
        return {"tokens": tokens, "logits": reference(tokens).logits[0].contiguous()}


def main(target: Path, names: list[str]) -> None:
    samples = torch.randint(3, VOCABULARY, (4, 64), generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.DataLoader(samples, batch_size=4)
    for name, (config, packing) in SETTINGS.items():
        if names and name not in names:
            continue
        quantizer = ModelQuantizer(config)
        model = quantizer.freeze(quantizer.quantize_model(plain().bfloat16(), data))
        with torch.no_grad():
            export_safetensors(model, str(target / name), pack_method=packing)
        save_file(expected(target / name), target / name / "expected.safetensors")
        print("made", name, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
