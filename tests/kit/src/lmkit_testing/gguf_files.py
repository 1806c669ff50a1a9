"""GGUF files of checkpoints in the form of `transformers`, written with the library of llama.cpp, names included."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from lmkit_testing.gguf_archs import SPECIAL

# Key of config.json -> method of the writer.
KEYS = {
    "max_position_embeddings": "add_context_length", "hidden_size": "add_embedding_length",
    "num_hidden_layers": "add_block_count", "intermediate_size": "add_feed_forward_length",
    "num_attention_heads": "add_head_count", "num_key_value_heads": "add_head_count_kv",
    "rms_norm_eps": "add_layer_norm_rms_eps", "layer_norm_eps": "add_layer_norm_eps",
    "norm_epsilon": "add_layer_norm_eps", "norm_eps": "add_layer_norm_eps",
    "head_dim": "add_key_length", "sliding_window": "add_sliding_window",
    "attn_logit_softcapping": "add_attn_logit_softcapping", "final_logit_softcapping": "add_final_logit_softcapping",
    "num_experts": "add_expert_count", "num_local_experts": "add_expert_count",
    "num_experts_per_tok": "add_expert_used_count", "moe_intermediate_size": "add_expert_feed_forward_length",
    "shared_expert_intermediate_size": "add_expert_shared_feed_forward_length", "logit_scale": "add_logit_scale",
    "embedding_multiplier": "add_embedding_scale", "residual_multiplier": "add_residual_scale",
    "attention_multiplier": "add_attention_scale", "logits_scaling": "add_logit_scale",
    "use_parallel_residual": "add_parallel_residual", "vocab_size": "add_vocab_size",
}  # fmt: skip
PERMUTED = ("llama", "granite", "granitemoe", "olmo", "smollm3", "arcee")
OFFSET = ("gemma", "gemma2", "gemma3", "nemotron")
PLAIN = re.compile(r"gate_inp|position_embd|conv1d|conv\.|\.bias$")  # what the converters never quantize
EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(\w+)\.weight")


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """As the converters of Llama's relatives store them: halves of a head become pairs of neighbours."""
    n = len(rows)
    return rows.reshape(heads, 2, n // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write(
    folder: Path,
    target: Path,
    arch: str,
    type: str = "F32",
    *,
    dequantized: bool = False,
    more: Mapping[str, np.ndarray] | None = None,
    **metadata: Any,
) -> Path:
    """`type`: of all matrices but routers. `dequantized`: they are stored as what blocks of that type stand for.

    `more`: other tensors. `metadata`: methods of the writer and their argument.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(target, arch)
    otherwise, own, _ = SPECIAL.get(arch, ((), None, None))
    for key, method in KEYS.items():
        if config.get(key) and key not in otherwise:
            getattr(writer, method)(config[key])
    rope = config.get("rope_parameters") or {}
    theta = rope.get("rope_theta") or rope.get("full_attention", {}).get("rope_theta")
    writer.add_rope_freq_base(theta or config.get("rope_theta", 10000.0))
    if "num_attention_heads" in config and "num_attention_heads" not in otherwise:
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1
        writer.add_rope_dimension_count(int(head * partial))
    if config.get("head_dim") and "head_dim" not in otherwise:
        writer.add_value_length(config["head_dim"])
    if own is not None:
        own(writer, config)
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings", 64))
    end = config.get("eos_token_id")
    writer.add_eos_token_id(end if isinstance(end, int) else 1)
    for key, value in metadata.items():
        getattr(writer, key)(value)
    for name, values in {**tensors(folder, config, arch), **(more or {})}.items():
        kind = gguf.GGMLQuantizationType["F32" if values.ndim < 2 or PLAIN.search(name) else type]
        stored = gguf.quants.quantize(np.ascontiguousarray(values, np.float32), kind)
        if dequantized:
            stored, kind = gguf.quants.dequantize(stored, kind), gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def tensors(folder: Path, config: Mapping[str, Any], arch: str) -> dict[str, np.ndarray]:
    """By their names in the file."""
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    layers = next(config[key] for key in ("num_hidden_layers", "n_layer", "n_layers") if key in config)
    names = gguf.get_tensor_name_map(number, layers)
    change = SPECIAL.get(arch, ((), None, None))[2]
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.float().numpy()
        if match := EXPERT.fullmatch(name):
            merged = f"{match[1]}{match[3]}.weight"
            for stack in change(merged, values, config) if change else (merged,):
                experts.setdefault(stack, {})[int(match[2])] = values
            continue
        if arch in PERMUTED and re.search(r"\.(q|k)_proj\.", name):
            heads = config["num_attention_heads" if ".q_proj" in name else "num_key_value_heads"]
            values = permuted(values, heads)
        if arch in OFFSET and name.endswith("norm.weight"):
            values = values + 1
        found |= change(name, values, config) if change is not None else {name: values}
    found |= {name: np.stack([stack[e] for e in sorted(stack)]) for name, stack in experts.items()}
    renamed = {}
    for name, values in found.items():
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert known is not None, name
        renamed[known] = values
    return renamed


def vocabulary(folder: Path) -> dict[str, Any]:
    """The tokenizer of a checkpoint, byte-level BPE, as methods of the writer; its text is split as that of GPT-2."""
    found = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    added = {token["id"]: token for token in found["added_tokens"]}
    texts = {i: text for text, i in found["model"]["vocab"].items()} | {
        i: token["content"] for i, token in added.items()
    }
    kinds = gguf.TokenType
    types = [
        kinds.NORMAL if i not in added else kinds.CONTROL if added[i]["special"] else kinds.USER_DEFINED
        for i in range(len(texts))
    ]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in found["model"]["merges"]]
    return {
        "add_tokenizer_model": "gpt2", "add_tokenizer_pre": "gpt-2",
        "add_token_list": [texts[i] for i in range(len(texts))], "add_token_types": types, "add_token_merges": merges,
        "add_chat_template": settings["chat_template"], "add_add_bos_token": False,
    }  # fmt: skip
