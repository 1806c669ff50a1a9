"""Checkpoints quantized by llmcompressor: `python produce_llmcompressor.py FOLDER [NAME ...]`, in an environment that
has it.

Each is a tiny Llama with what its producer makes of it: `expected.safetensors` holds token ids and the logits of
transformers over the weights that the producer's own decompression gives. Both are float32. `rounded` are the logits
where activations, and keys and values, are rounded as well, by the producer's own functions.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.modeling import initialize_hooked_kv_cache
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize, forward_quantize
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 32
TOKEN: dict[str, Any] = {"num_bits": 8, "strategy": "token", "dynamic": True}
TENSOR: dict[str, Any] = {"num_bits": 8, "strategy": "tensor"}


def integers(bits: int, group: int = 0, **more: object) -> dict[str, Any]:
    """Weights of `bits` bits; `group` columns share a scale, 0 = all of a row."""
    how = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return {"num_bits": bits, "type": "int", **how, **more}


def floats(**more: object) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", **more}


LINEAR = ["Linear"]


def preset(name: str, targets: list[str] = LINEAR) -> dict[str, Any]:
    return preset_name_to_scheme(name, targets).model_dump(exclude_none=True)


MADE: dict[str, list[dict[str, Any]]] = {
    "w4": [{"targets": LINEAR, "weights": integers(4, 32)}],
    "w4_zeros": [{"targets": LINEAR, "weights": integers(4, 32, symmetric=False)}],
    "w8_zeros": [{"targets": LINEAR, "weights": integers(8, symmetric=False)}],
    "w8a8": [
        {"targets": LINEAR, "weights": integers(8), "input_activations": TOKEN | {"type": "int"}},
        {"targets": ["re:.*mlp.*"], "weights": integers(4, 32), "input_activations": TOKEN | {"type": "int"}},
    ],
    "fp8": [{
        "targets": LINEAR, "weights": floats(strategy="channel"), "input_activations": TOKEN | {"type": "float"},
    }],
    "fp8_block": [{
        "targets": LINEAR, "weights": floats(strategy="block", block_structure=[32, 64]),
        "input_activations": floats(strategy="group", group_size=64, dynamic=True),
    }],
    "mixed": [
        {"targets": ["re:.*mlp.*"], "weights": integers(4, 32)},
        {"targets": ["re:.*self_attn.[qkv]_proj$"], "weights": floats(strategy="channel"),
         "input_activations": TOKEN | {"type": "float"}},
    ],
    "static": [
        {"targets": LINEAR, "weights": floats(strategy="tensor"), "input_activations": TENSOR | {"type": "float"}},
        {"targets": ["re:.*o_proj"], "weights": integers(8)},
        {"targets": ["re:.*(up|gate)_proj"], "weights": integers(3, 32, symmetric=False)},
        {"targets": ["model.layers.0.mlp.down_proj"], "weights": integers(4)},
    ],
    "nvfp4": [preset("NVFP4A16")],
    "nvfp4_activations": [preset("NVFP4")],
    "mxfp4": [preset("MXFP4A16")],
    "mxfp4_activations": [preset("MXFP4", ["re:.*self_attn.*"]), preset("NVFP4A16", ["re:.*mlp.*"])],
}  # fmt: skip


CACHES: dict[str, dict[str, Any]] = {"static": floats(strategy="tensor", dynamic=False)}


def plain(folder: Path) -> Path:
    """The model that is quantized."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    named = {"unk_token": "w0", "bos_token": "w1", "eos_token": "w2", "pad_token": "w0"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    return folder


def four_bits(stored: dict[str, torch.Tensor], scheme: QuantizationScheme) -> torch.Tensor:
    """A weight in 4-bit floats, by the steps of the producer's decompression, in float32 instead of bfloat16."""
    packed, scale = stored["weight_packed"], stored["weight_scale"]
    numbers = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], torch.float32)
    scale = (decompress_mx_scale(scale) if scale.dtype == torch.uint8 else scale).float()
    whole = stored.get("weight_global_scale")
    return dequantize(x_q=numbers, scale=scale, args=scheme.weights, global_scale=whole, dtype=torch.float32)


def expected(model: LlamaForCausalLM, source: Path) -> dict[str, torch.Tensor]:
    """Logits by the producer's own weights, of a model that it has compressed."""
    reference = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    weights = {k: v.float() for k, v in model.state_dict().items() if k in reference.state_dict()}
    for name, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None or scheme.weights is None:
            continue
        if scheme.weights.num_bits == 4 and scheme.weights.type == "float":
            weights[f"{name}.weight"] = four_bits(module.state_dict(), scheme)
            continue
        own = {key: value.float() if key == "weight_scale" else value for key, value in module.state_dict().items()}
        stored = BaseCompressor.get_value_from_registry(scheme.format).decompress(own, scheme)
        weights[f"{name}.weight"] = stored["weight"].float()
    reference.load_state_dict(weights)
    tokens = torch.tensor([[(7 * i + 3) % VOCABULARY for i in range(40)]])
    with torch.no_grad():
        found = {"tokens": tokens, "logits": reference(tokens).logits[0].contiguous()}
        if round_too(model, reference):
            found["rounded"] = reference(tokens).logits[0].contiguous()
    return found


def rounded(own: Any, inputs: Any, _: torch.nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """A hook before a linear: its input through 8 bits and back."""
    return (forward_quantize(own, given[0], "input", inputs),)


def round_too(model: LlamaForCausalLM, reference: LlamaForCausalLM) -> bool:
    """Lets `reference` round activations, keys and values as `model` says. Whether there is anything to round."""
    modules, some = dict(reference.named_modules()), False
    for name, own in model.named_modules():
        scheme = getattr(own, "quantization_scheme", None)
        inputs = None if scheme is None else scheme.input_activations
        if inputs is None or inputs.num_bits == 4:
            continue
        some, module = True, modules[name]
        scales = {key: value.float() for key, value in own.state_dict().items() if key.endswith("_scale")}
        values = scales | {"quantization_scheme": scheme, "quantization_status": own.quantization_status}
        if isinstance(own, torch.nn.Linear):
            module.register_forward_pre_hook(partial(rounded, SimpleNamespace(**values), inputs))
            continue
        for key, value in values.items():
            setattr(module, key, value)
        initialize_hooked_kv_cache(reference, module)
    return some


def main(target: Path, names: list[str]) -> None:
    source = plain(target / "plain")
    torch.manual_seed(1)
    samples = torch.randint(3, VOCABULARY, (16, 64)).tolist()
    calibration = Dataset.from_list([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in samples])
    for name, groups in MADE.items():
        if names and name not in names:
            continue
        model = LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        schemes = {f"group_{i}": QuantizationScheme(**each) for i, each in enumerate(groups)}
        settings: dict[str, Any] = {"config_groups": schemes, "ignore": [] if name == "w8_zeros" else ["lm_head"]}
        settings |= {"kv_cache_scheme": CACHES[name]} if name in CACHES else {}
        recipe = GPTQModifier(**settings) if name == "w4" else QuantizationModifier(**settings)
        kind = {"dataset": calibration, "num_calibration_samples": 16, "max_seq_length": 64}
        needed = name in ("w4", "static", "nvfp4_activations")
        oneshot(model=model, recipe=recipe, **(kind if needed else {}))
        model.save_pretrained(target / name, save_compressed=True)
        save_file(expected(model, source), target / name / "expected.safetensors")
        print("made", name, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
