"""Keys of architectures that are read together with others, or stand for what other checkpoints spell out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lmkit.api import UnsupportedModel

SHARP = "yarn_log_multiplier"  # a tenth of both `mscale` of YaRN, until rotary parameters are read
SOFTMAX, SIGMOID = 1, 2  # values of expert_gating_func
GROUPS = {256: (8, 4)}  # experts -> groups, and groups of a token, where files of DeepSeek V3 do not say them


def deepseek2(config: dict[str, Any], given: dict[str, Any]) -> None:
    """Latent attention: sizes of heads are said as those of the latents, beside what they are without them.

    Sigmoid scores are those of V3, softmax those of V2.
    """
    turned = given.pop("rope.dimension_count", 0)
    heads = given.pop("attention.key_length_mla", None), given.pop("attention.value_length_mla", None)
    plain = config.pop("head_dim", None), given.pop("attention.value_length", None)
    key, value = heads if all(heads) else plain  # older files have those of heads only
    if not all(isinstance(size, int) for size in (key, value, turned)):
        raise UnsupportedModel("attention.key_length_mla", key, "sizes of heads")
    config |= {"qk_rope_head_dim": turned, "qk_nope_head_dim": key - turned, "v_head_dim": value}
    config |= {"num_key_value_heads": config.get("num_attention_heads"), "head_dim": turned}
    gating = given.pop("expert_gating_func", SOFTMAX)
    if gating not in (SOFTMAX, SIGMOID):
        raise UnsupportedModel("expert_gating_func", gating, "softmax (1) or sigmoid (2)")
    groups = given.pop("expert_group_count", None), given.pop("expert_group_used_count", None)
    norm = given.pop("expert_weights_norm", gating == SIGMOID)
    config |= {"norm_topk_prob": norm, "q_lora_rank": config.get("q_lora_rank")}  # None: queries have no latent
    num, used = groups if all(groups) else GROUPS.get(config.get("n_routed_experts", 0), (1, 1))
    if gating == SIGMOID:
        config |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
        config |= {"n_group": num, "topk_group": used, "num_nextn_predict_layers": 0}
    elif all(groups) and num > 1:
        config |= {"n_group": num, "topk_group": used, "topk_method": "group_limited_greedy"}
    if sharp := given.pop("rope.scaling.yarn_log_multiplier", 0.0):
        config[SHARP] = sharp


def granite_moe(config: dict[str, Any], given: dict[str, Any]) -> None:
    """Experts have the size of the MLP."""
    if given.pop("expert_feed_forward_length", config.get("intermediate_size")) != config.get("intermediate_size"):
        raise UnsupportedModel("expert_feed_forward_length", "another", "feed_forward_length")


def gpt_oss(config: dict[str, Any], given: dict[str, Any]) -> None:
    """Experts have the size of the MLP."""
    config["intermediate_size"] = given.pop("expert_feed_forward_length", config.get("intermediate_size"))


def lfm2(config: dict[str, Any], given: dict[str, Any]) -> None:
    """Layers without heads of keys are convolutions."""
    heads = config.get("num_key_value_heads")
    if not isinstance(heads, list) or not all(isinstance(num, int) for num in heads):
        raise UnsupportedModel("attention.head_count_kv", heads, "a number for each layer")
    config["layer_types"] = ["full_attention" if num else "conv" for num in heads]
    config["num_key_value_heads"] = max(heads, default=0)


def falcon(config: dict[str, Any], given: dict[str, Any]) -> None:
    """One head of keys, or groups as in larger models."""
    keys = config.pop("num_key_value_heads", 1)
    config |= {"new_decoder_architecture": keys > 1, "num_kv_heads": keys, "multi_query": keys == 1}


def llama4(config: dict[str, Any], given: dict[str, Any]) -> None:
    """Experts, and MLPs of other layers, have sizes of their own."""
    config["intermediate_size_mlp"] = config.get("intermediate_size")
    config["intermediate_size"] = given.pop("expert_feed_forward_length", config.get("intermediate_size"))


def without_drafts(config: dict[str, Any], given: dict[str, Any]) -> None:
    """Layers that predict further tokens are counted with the others, and not loaded."""
    unused, layers = given.pop("nextn_predict_layers", 0), config.get("num_hidden_layers")
    if isinstance(layers, int) and isinstance(unused, int):
        config["num_hidden_layers"] = layers - unused


def seeing(config: dict[str, Any], given: dict[str, Any]) -> None:
    """The part of a model that reads texts, whose positions are the same on all axes."""
    for key in ("rope.dimension_sections", "n_deepstack_layers"):
        given.pop(key, None)


def qwen3next(config: dict[str, Any], given: dict[str, Any]) -> None:
    qwen35(config, given)
    config["norm_topk_prob"] = given.pop("expert_weights_norm", True)


def mpt(config: dict[str, Any], given: dict[str, Any]) -> None:
    """Biases of positions of the usual size; limits of queries, keys and values."""
    attention: dict[str, Any] = {"alibi_bias_max": given.pop("attention.max_alibi_bias", 8.0)}
    if (limit := given.pop("attention.clamp_kqv", None)) is not None:
        attention["clip_qkv"] = limit
    config["attn_config"] = attention
    if config.pop("num_key_value_heads", config.get("n_heads")) != config.get("n_heads"):
        raise UnsupportedModel("attention.head_count_kv", "another", "attention.head_count")


def starcoder(config: dict[str, Any], given: dict[str, Any]) -> None:
    config["multi_query"] = config.pop("num_key_value_heads", 1) == 1


def qwen35(config: dict[str, Any], given: dict[str, Any]) -> None:
    """Gated delta nets. Positions of a text are the same on all axes."""
    without_drafts(config, given)
    given.pop("rope.dimension_sections", None)
    inner, heads = given.pop("ssm.inner_size", 0), config.get("linear_num_value_heads", 0)
    if not heads or inner % heads:
        raise UnsupportedModel("ssm.inner_size", inner, f"a multiple of ssm.time_step_rank ({heads})")
    config["linear_value_head_dim"] = inner // heads


def routed(config: dict[str, Any], given: dict[str, Any]) -> None:
    """Sigmoid scores, and groups of experts."""
    if given.pop("expert_gating_func", SIGMOID) != SIGMOID:
        raise UnsupportedModel("expert_gating_func", "another", "sigmoid (2)")
    config["norm_topk_prob"] = given.pop("expert_weights_norm", False)
    config["n_group"] = given.pop("expert_group_count", 1) or 1
    config["topk_group"] = given.pop("expert_group_used_count", 1) or 1
    config["num_nextn_predict_layers"] = 0
    without_drafts(config, given)


def ernie_moe(config: dict[str, Any], given: dict[str, Any]) -> None:
    """The shared experts have the size of that many of the others."""
    size = config.get("moe_intermediate_size", 0) * config.get("moe_num_shared_experts", 0)
    if (shared := given.pop("expert_shared_feed_forward_length", size)) != size:
        raise UnsupportedModel("expert_shared_feed_forward_length", shared, f"{size}")


def lfm2_moe(config: dict[str, Any], given: dict[str, Any]) -> None:
    """Scores are those of a sigmoid."""
    lfm2(config, given)
    if given.pop("expert_gating_func", SIGMOID) != SIGMOID:
        raise UnsupportedModel("expert_gating_func", "another", "sigmoid (2)")


def minimax(config: dict[str, Any], given: dict[str, Any]) -> None:
    """Scores are those of a sigmoid; all layers have experts."""
    lfm = given.pop("expert_gating_func", SIGMOID)
    if lfm != SIGMOID:
        raise UnsupportedModel("expert_gating_func", lfm, "sigmoid (2)")
    config["intermediate_size"] = given.pop("expert_feed_forward_length", config.get("intermediate_size"))


def olmo(config: dict[str, Any], given: dict[str, Any]) -> None:
    """Norms without weights, whose epsilon is fixed."""
    if abs(float(given.pop("attention.layer_norm_epsilon", 1e-5)) - 1e-5) > 1e-8:
        raise UnsupportedModel("attention.layer_norm_epsilon", "another", "1e-5")


def mamba(config: dict[str, Any], given: dict[str, Any]) -> None:
    """Sizes of what there is not are 0."""
    if given.pop("ssm.dt_b_c_rms", False):
        raise UnsupportedModel("ssm.dt_b_c_rms", True, "false")
    for key in ("num_attention_heads", "num_key_value_heads"):
        config.pop(key, None)
    given.pop("feed_forward_length", None)
    if heads := config.get("num_heads"):
        config["head_dim"] = config.get("intermediate_size", 0) // heads
    inner, hidden = config.get("intermediate_size", 0), config.get("hidden_size", 0)
    if not hidden or inner % hidden:
        raise UnsupportedModel("ssm.inner_size", inner, f"a multiple of {hidden}")
    config["expand"] = inner // hidden


READERS: Mapping[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
    "deepseek2": deepseek2,
    "granitemoe": granite_moe,
    "gpt-oss": gpt_oss,
    "lfm2": lfm2,
    "falcon": falcon,
    "llama4": llama4,
    "glm4moe": routed,
    "qwen35": qwen35,
    "qwen35moe": qwen35,
    "qwen3next": qwen3next,
    "qwen2vl": seeing,
    "qwen3vl": seeing,
    "qwen3vlmoe": seeing,
    "mpt": mpt,
    "starcoder": starcoder,
    "dots1": routed,
    "ernie4_5-moe": ernie_moe,
    "lfm2moe": lfm2_moe,
    "minimax-m2": minimax,
    "olmo": olmo,
    "mamba": mamba,
    "mamba2": mamba,
}
