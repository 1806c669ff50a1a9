"""What llama.cpp's converters do for single architectures: metadata of their own, and tensors in another layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gguf
import numpy as np

Tensors = dict[str, np.ndarray]


def deepseek2_keys(writer: Any, config: Mapping[str, Any]) -> None:
    rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_head_count_kv(1)
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + turned)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + turned)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(turned)
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    v3 = config["architectures"] == ["DeepseekV3ForCausalLM"]
    writer.add_expert_weights_norm(v3)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if v3 else gguf.ExpertGatingFuncType.SOFTMAX)
    if (config.get("n_group") or 1) > 1:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if sharp := (config.get("rope_parameters") or {}).get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * sharp)


def deepseek2(name: str, values: np.ndarray, config: Mapping[str, Any]) -> Tensors:
    if not name.endswith("kv_b_proj.weight"):
        return {name.replace("e_score_correction_bias", "e_score_correction.bias"): values}
    heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
    split = values.reshape(heads, plain + config["v_head_dim"], config["kv_lora_rank"])
    keys, others = split[:, :plain].swapaxes(1, 2), split[:, plain:]
    return {name.replace("kv_b", "k_b"): keys, name.replace("kv_b", "v_b"): others}


def gpt_oss_keys(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def gpt_oss(name: str, values: np.ndarray, config: Mapping[str, Any]) -> Tensors:
    if name.endswith("sinks"):
        return {f"{name}.weight": values}
    if ".experts." not in name:
        return {name: values}
    kind = "bias" if name.endswith("_bias") else "weight"
    values = values if kind == "bias" else values.swapaxes(1, 2)
    module = name.removesuffix("_bias")
    if "down_proj" in name:
        return {f"{module}.{kind}": values}
    return {f"{module.replace('gate_up', part)}.{kind}": values[:, i::2] for i, part in enumerate(("gate", "up"))}


def granitemoe(name: str, values: np.ndarray, config: Mapping[str, Any]) -> Tensors:
    if "input_linear" not in name:
        return {name: values}
    gate, up = np.split(values, 2, axis=1)
    block = name.partition("block_sparse_moe")[0] + "mlp.experts"
    return {f"{block}.gate_proj.weight": gate, f"{block}.up_proj.weight": up}


def lfm2_keys(writer: Any, config: Mapping[str, Any]) -> None:
    keys = config["num_key_value_heads"]
    writer.add_head_count_kv([keys if kind == "full_attention" else 0 for kind in config["layer_types"]])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_layer_norm_rms_eps(config["norm_eps"])


def lfm2(name: str, values: np.ndarray, config: Mapping[str, Any]) -> Tensors:
    return {name: values[:, 0] if name.endswith("conv.conv.weight") else values}


def falcon_keys(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_head_count_kv(config["num_kv_heads"] if config["new_decoder_architecture"] else 1)
    writer.add_context_length(2048)
    writer.add_tensor_data_layout("jploski")
    writer.add_feed_forward_length(4 * config["hidden_size"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def falcon(name: str, values: np.ndarray, config: Mapping[str, Any]) -> Tensors:
    if "query_key_value" not in name:
        return {name: values}
    keys = config["num_kv_heads"] if config["new_decoder_architecture"] else 1
    size = config["hidden_size"] // config["num_attention_heads"]
    share = config["num_attention_heads"] // keys
    groups = values.reshape(keys, share + 2, size, *values.shape[1:])
    parts = groups[:, :-2], groups[:, -2:-1], groups[:, -1:]
    return {name: np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])}


def gpt2_keys(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_block_count(config["n_layer"])
    writer.add_head_count(config["n_head"])
    writer.add_feed_forward_length(config.get("n_inner") or 4 * config["n_embd"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def gpt2(name: str, values: np.ndarray, config: Mapping[str, Any]) -> Tensors:
    linear = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
    return {name: values.T if linear else values}


def llama4_keys(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_feed_forward_length(config["intermediate_size_mlp"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])


def llama4(name: str, values: np.ndarray, config: Mapping[str, Any]) -> Tensors:
    if "experts." not in name:
        return {name: values}
    values = values.swapaxes(1, 2)
    if "down_proj" in name:
        return {f"{name}.weight": values}
    gate, up = np.split(values, 2, axis=1)
    return {f"{name.replace('gate_up', part)}.weight": half for part, half in (("gate", gate), ("up", up))}


def routed_keys(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def glm4moe_keys(writer: Any, config: Mapping[str, Any]) -> None:
    routed_keys(writer, config)
    writer.add_block_count(config["num_hidden_layers"] + 1)
    writer.add_nextn_predict_layers(1)


def corrected(name: str, values: np.ndarray, config: Mapping[str, Any]) -> Tensors:
    return {name.replace("e_score_correction_bias", "e_score_correction.bias"): values.reshape(values.shape[-1:])} if (
        "e_score_correction" in name
    ) else {name: values}  # fmt: skip


def ernie_keys(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_expert_count(config["moe_num_experts"])
    writer.add_expert_used_count(config["moe_k"])
    writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    writer.add_expert_shared_count(config["moe_num_shared_experts"])
    writer.add_expert_shared_feed_forward_length(config["moe_intermediate_size"] * config["moe_num_shared_experts"])


def lfm2moe_keys(writer: Any, config: Mapping[str, Any]) -> None:
    lfm2_keys(writer, config)
    writer.add_leading_dense_block_count(config["num_dense_layers"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def lfm2moe(name: str, values: np.ndarray, config: Mapping[str, Any]) -> Tensors:
    for old, new in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        name = name.replace(f"experts.{old}", f"experts.{new}")
    return {} if "lm_head" in name else lfm2(name.replace("expert_bias", "expert_bias.bias"), values, config)


def minimax_keys(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def olmo_keys(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_layer_norm_eps(1e-5)
    if config.get("clip_qkv"):
        writer.add_clamp_kqv(config["clip_qkv"])


def mamba_keys(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["state_size"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    if "num_heads" in config:
        writer.add_ssm_inner_size(config["num_heads"] * config["head_dim"])
        writer.add_ssm_time_step_rank(config["num_heads"])
        writer.add_ssm_group_count(config["n_groups"])
    else:
        writer.add_ssm_inner_size(config["intermediate_size"])
        writer.add_ssm_time_step_rank(config["time_step_rank"])
        writer.add_ssm_dt_b_c_rms(False)


def mamba(name: str, values: np.ndarray, config: Mapping[str, Any]) -> Tensors:
    second = "num_heads" in config
    if name.endswith("A_log"):
        values = -np.exp(values)
    if second and name.endswith(("A_log", ".D")):
        values = values.reshape(-1, 1)
    if second and name.endswith("mixer.norm.weight"):
        values = values.reshape(config["n_groups"], -1)
    if "conv1d.weight" in name:
        values = values[:, 0]
    return {name.replace("dt_bias", "dt_proj.bias"): values}


def qwen35_keys(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(2)
    writer.add_rope_dimension_sections([1, 1, 0, 0])


def in_turn(values: np.ndarray, config: Mapping[str, Any], axis: int = 0) -> np.ndarray:
    """Heads of values by key -> those of all keys in turn."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    rows = np.moveaxis(values, axis, 0)
    rows = rows.reshape(keys, heads // keys, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)
    return np.moveaxis(rows, 0, axis)


def qwen35(name: str, values: np.ndarray, config: Mapping[str, Any]) -> Tensors:
    first = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    if name.endswith("norm.weight") and "linear_attn" not in name:
        values = values + 1
    elif name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        values = values[:, 0] if "conv1d" in name else values
        values = np.concatenate([values[:first], in_turn(values[first:], config)])
    elif name.endswith(("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "dt_bias")):
        values = in_turn(values, config)
    elif name.endswith("A_log"):
        values = in_turn(-np.exp(values), config)
    elif name.endswith("linear_attn.out_proj.weight"):
        values = in_turn(values, config, 1)
    return {name.replace("dt_bias", "dt_proj.bias"): values}


def qwen3next(name: str, values: np.ndarray, config: Mapping[str, Any]) -> Tensors:
    keys, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    share = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    if name.endswith("norm.weight") and "linear_attn" not in name:
        values = values + 1
    elif name.endswith("A_log"):
        values = -np.exp(values)
    elif name.endswith("conv1d.weight"):
        values = values[:, 0]
    elif name.endswith("in_proj_qkvz.weight"):
        groups = values.reshape(keys, -1, values.shape[-1])
        parts = np.split(groups, np.cumsum([size, size, share]), axis=1)
        q, k, v, z = (part.reshape(-1, values.shape[-1]) for part in parts)
        return {name.replace("qkvz", "qkv"): np.concatenate([q, k, v]), name.replace("qkvz", "z"): z}
    return {name.replace("dt_bias", "dt_proj.bias"): values}


def seeing_keys(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_rope_dimension_sections([2, 2, 2, 0])


def neox(name: str, values: np.ndarray, config: Mapping[str, Any]) -> Tensors:
    name = name.removeprefix("transformer.")
    if "query_key_value" not in name:
        return {name: values}
    heads = config.get("num_attention_heads") or config["n_head"]
    return {name: values.reshape(heads, 3, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)}


def bloom_keys(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_context_length(256)
    writer.add_block_count(config["n_layer"])
    writer.add_feed_forward_length(4 * config["hidden_size"])
    writer.add_head_count(config["n_head"])
    writer.add_head_count_kv(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def mpt_keys(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_context_length(256)
    writer.add_embedding_length(config["d_model"])
    writer.add_block_count(config["n_layers"])
    writer.add_feed_forward_length(4 * config["d_model"])
    writer.add_head_count(config["n_heads"])
    writer.add_layer_norm_eps(1e-5)
    writer.add_max_alibi_bias(config["attn_config"]["alibi_bias_max"])
    if config["attn_config"].get("clip_qkv"):
        writer.add_clamp_kqv(config["attn_config"]["clip_qkv"])


def starcoder_keys(writer: Any, config: Mapping[str, Any]) -> None:
    gpt2_keys(writer, config)
    writer.add_head_count_kv(1 if config["multi_query"] else config["n_head"])


LENGTHS = ("intermediate_size", "head_dim", "num_key_value_heads", "norm_eps")
SHORT = ("intermediate_size", "num_key_value_heads", "max_position_embeddings")
MAMBA = ("intermediate_size", "head_dim", "num_attention_heads", "num_key_value_heads")
# architecture -> keys of config.json that are said otherwise, what says them, and what is done to each tensor
SPECIAL: Mapping[str, tuple[tuple[str, ...], Callable[..., None] | None, Callable[..., Tensors] | None]] = {
    "deepseek2": (("head_dim", "num_key_value_heads"), deepseek2_keys, deepseek2),
    "gpt-oss": ((), gpt_oss_keys, gpt_oss),
    "granitemoe": ((), None, granitemoe),
    "lfm2": (LENGTHS[2:], lfm2_keys, lfm2),
    "falcon": ((), falcon_keys, falcon),
    "gpt2": (LENGTHS[2:3], gpt2_keys, gpt2),
    "llama4": (LENGTHS[:1], llama4_keys, llama4),
    "glm4moe": (("num_hidden_layers",), glm4moe_keys, corrected),
    "dots1": (("sliding_window",), routed_keys, corrected),
    "ernie4_5-moe": ((), ernie_keys, corrected),
    "lfm2moe": (LENGTHS[2:], lfm2moe_keys, lfm2moe),
    "minimax-m2": ((), minimax_keys, corrected),
    "olmo": ((), olmo_keys, None),
    "qwen35": ((), qwen35_keys, qwen35),
    "qwen35moe": ((), qwen35_keys, qwen35),
    "qwen3next": ((), qwen35_keys, qwen3next),
    "qwen2vl": ((), seeing_keys, None),
    "qwen3vl": ((), seeing_keys, None),
    "qwen3vlmoe": ((), seeing_keys, None),
    "gptneox": (("num_key_value_heads",), None, neox),
    "bloom": (SHORT, bloom_keys, neox),
    "mpt": (SHORT, mpt_keys, None),
    "starcoder": (SHORT, starcoder_keys, None),
    "mamba": (MAMBA, mamba_keys, mamba),
    "mamba2": (MAMBA, mamba_keys, mamba),
}
