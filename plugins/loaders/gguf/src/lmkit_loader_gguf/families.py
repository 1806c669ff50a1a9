"""Architectures of GGUF files that have a native family here: what their metadata and tensors are called there.

Source of the keys and names: `gguf-py/gguf/constants.py` and `convert_hf_to_gguf.py` of llama.cpp, which writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MOE_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{e}.gate_proj",
    "ffn_up_exps": "mlp.experts.{e}.up_proj",
    "ffn_down_exps": "mlp.experts.{e}.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture.

    `keys` and `names` are added to the usual ones, `fixed` to the configuration. `permuted`: rows of queries and keys
    lie as for pairs of neighbours. `offset_norms`: weights of norms are stored 1 greater than `transformers` has them.
    `biased`: tensor -> the key that says whether it has a bias; `weighted`: whether it is there at all. A name that
    ends with "=" is that of a tensor, not of a module. `layouts`: tensor -> how the family stores it, of
    `lmkit_loader_gguf.layouts`. `stacks`: experts -> module in which the family has all of them. `layers`: what they
    are in. `sizes`: keys of what layouts depend on. `rope`: what belongs to rotary positions that are stretched.
    """

    architecture: str
    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    permuted: bool = False
    offset_norms: bool = False
    partial: bool = False  # rope.dimension_count may be less than a head
    biased: Mapping[str, str] = field(default_factory=dict)
    weighted: Mapping[str, str] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, str] = field(default_factory=dict)
    layers: str = "model.layers"
    turned: bool = True  # heads have rotary positions
    sizes: tuple[str, ...] = ("attention.head_count", "attention.head_count_kv")
    rope: Mapping[str, Any] = field(default_factory=dict)


LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
PARTS, INTO = ("gate", "up", "down"), ("ffn_gate_exps", "ffn_up_exps")
LLAMA_BIASES = {"attn_q": "attention_bias", "ffn_up": "mlp_bias"}
GEMMA_ACTIVATION = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
MULTIPLIERS = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}
GEMMA_LIMITS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}

ROUTED = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_scale": "routed_scaling_factor",
}
ROUTED_NAMES = {
    **MOE_NAMES,
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in PARTS},
    "exp_probs_b": "mlp.gate.e_score_correction_bias=",
}
LFM2_KEYS = {"shortconv.l_cache": "conv_L_cache", "attention.layer_norm_rms_epsilon": "norm_eps"}
LFM2_NAMES = {
    "output_norm": "model.embedding_norm",
    "token_embd_norm": "model.embedding_norm",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
MAMBA_KEYS = {
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "ssm.conv_kernel": "conv_kernel",
    "ssm.inner_size": "intermediate_size",
    "ssm.state_size": "state_size",
}
MAMBA_NAMES = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "attn_norm": "norm",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_a": "mixer.A_log=",
    "ssm_d": "mixer.D=",
    "ssm_out": "mixer.out_proj",
}

DELTA_KEYS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
}
DELTA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_a": "linear_attn.A_log=",
    "ssm_dt": "linear_attn.dt_bias=",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
DELTA_SIZES = ("ssm.group_count", "ssm.time_step_rank", "ssm.state_size")
DELTA_LAYOUTS = {
    "attn_qkv": "keys_values",
    "ssm_conv1d": "keys_values_column",
    "ssm_a": "value_logarithm",
    "ssm_out": "value_columns",
    **dict.fromkeys(("attn_gate", "ssm_alpha", "ssm_beta", "ssm_dt"), "values"),
}

FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM", model_type="llama", permuted=True, biased=LLAMA_BIASES),
    "llama experts": Family(
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        keys=LOCAL_EXPERTS,
        names={
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.{e}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{e}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{e}.w2",
        },
        permuted=True,
    ),
    "qwen2": Family(architecture="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen2moe": Family(
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        keys={
            **EXPERTS,
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        names=MOE_NAMES,
        fixed={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "qwen3": Family(architecture="Qwen3ForCausalLM", model_type="qwen3"),
    "qwen3moe": Family(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        keys={**EXPERTS, "expert_feed_forward_length": "moe_intermediate_size"},
        names=MOE_NAMES,
        fixed={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "gemma": Family(architecture="GemmaForCausalLM", model_type="gemma", fixed=GEMMA_ACTIVATION, offset_norms=True),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        keys=GEMMA_LIMITS,
        names=SANDWICH,
        fixed=GEMMA_ACTIVATION,
        offset_norms=True,
    ),
    "gemma3": Family(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        keys={
            **GEMMA_LIMITS,
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        names=SANDWICH,
        fixed={**GEMMA_ACTIVATION, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6},
        offset_norms=True,
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        partial=True,
        keys={"attention.sliding_window": "sliding_window"},
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    "granite": Family(
        architecture="GraniteForCausalLM",
        model_type="granite",
        keys=MULTIPLIERS,
        permuted=True,
        biased=LLAMA_BIASES,
    ),
    "olmo2": Family(architecture="Olmo2ForCausalLM", model_type="olmo2", names=BEHIND),
    "smollm3": Family(architecture="SmolLM3ForCausalLM", model_type="smollm3", permuted=True, biased=LLAMA_BIASES),
    "stablelm": Family(
        architecture="StableLmForCausalLM",
        model_type="stablelm",
        partial=True,
        keys={**LAYER_NORM, "use_parallel_residual": "use_parallel_residual"},
        biased={"attn_q": "use_qkv_bias"},
    ),
    "starcoder2": Family(
        architecture="Starcoder2ForCausalLM",
        model_type="starcoder2",
        keys={"attention.layer_norm_epsilon": "norm_epsilon"},
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        fixed={"sliding_window": None, "hidden_act": "gelu_pytorch_tanh"},
        biased={"attn_q": "use_bias"},
    ),
    "command-r": Family(
        architecture="CohereForCausalLM",
        model_type="cohere",
        keys={**LAYER_NORM, "logit_scale": "logit_scale"},
        biased={"attn_q": "attention_bias"},
    ),
    "arcee": Family(architecture="ArceeForCausalLM", model_type="arcee", permuted=True, biased=LLAMA_BIASES),
    "seed_oss": Family(
        architecture="SeedOssForCausalLM",
        model_type="seed_oss",
        names={"post_attention_norm": "post_attention_layernorm"},
        biased={"attn_q": "attention_bias", "attn_output": "attention_out_bias", "ffn_up": "mlp_bias"},
    ),
    "cohere2": Family(
        architecture="Cohere2ForCausalLM",
        model_type="cohere2",
        keys={**LAYER_NORM, "logit_scale": "logit_scale", "attention.sliding_window": "sliding_window"},
        biased={"attn_q": "attention_bias"},
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        model_type="olmoe",
        keys=EXPERTS,
        names=MOE_NAMES,
        fixed={"norm_topk_prob": False},
    ),
    "ernie4_5": Family(architecture="Ernie4_5ForCausalLM", model_type="ernie4_5", biased={"attn_q": "use_bias"}),
    "hunyuan-dense": Family(
        architecture="HunYuanDenseV1ForCausalLM",
        model_type="hunyuan_v1_dense",
        names={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
        biased={"attn_q": "attention_bias"},
    ),
    "nemotron": Family(
        architecture="NemotronForCausalLM",
        model_type="nemotron",
        keys={"attention.layer_norm_epsilon": "norm_eps"},
        fixed={"hidden_act": "relu2"},
        offset_norms=True,
        partial=True,
        biased=LLAMA_BIASES,
    ),
    "glm4": Family(
        architecture="Glm4ForCausalLM",
        model_type="glm4",
        names={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        partial=True,
        biased={"attn_q": "attention_bias"},
    ),
    "exaone4": Family(
        architecture="Exaone4ForCausalLM",
        model_type="exaone4",
        keys={"attention.sliding_window": "sliding_window"},
        names=BEHIND,
        fixed={"sliding_window": None},
    ),
    "gpt-oss": Family(
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        keys={**LOCAL_EXPERTS, "attention.sliding_window": "sliding_window"},
        names={
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks=",
            "ffn_gate_inp": "mlp.router",
            **{f"ffn_{part}_exps": f"mlp.experts.{{e}}.{part}_proj" for part in PARTS},
        },
        stacks={**dict.fromkeys(INTO, "mlp.experts.gate_up_proj"), "ffn_down_exps": "mlp.experts.down_proj"},
        rope={"truncate": False},
    ),
    "deepseek2": Family(
        architecture="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        keys={
            **ROUTED,
            "attention.q_lora_rank": "q_lora_rank",
            "attention.kv_lora_rank": "kv_lora_rank",
        },
        names={
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_k_b": "self_attn.kv_b_proj",
            **ROUTED_NAMES,
        },
        layouts={"attn_k_b": "latent"},
    ),
    "granitemoe": Family(
        architecture="GraniteMoeForCausalLM",
        model_type="granitemoe",
        keys={**MULTIPLIERS, **LOCAL_EXPERTS},
        names={
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            **{f"ffn_{part}_exps": f"block_sparse_moe.experts.{{e}}.{part}_proj" for part in PARTS},
        },
        stacks={
            **dict.fromkeys(INTO, "block_sparse_moe.input_linear.weight"),
            "ffn_down_exps": "block_sparse_moe.output_linear.weight",
        },
        permuted=True,
    ),
    "lfm2": Family(
        architecture="Lfm2ForCausalLM",
        model_type="lfm2",
        keys=LFM2_KEYS,
        names=LFM2_NAMES,
        fixed={"block_auto_adjust_ff_dim": False},
        layouts={"shortconv.conv": "column"},
    ),
    "falcon": Family(
        architecture="FalconForCausalLM",
        model_type="falcon",
        keys={"attention.layer_norm_epsilon": "layer_norm_epsilon", "feed_forward_length": "ffn_hidden_size"},
        names={
            "token_embd": "transformer.word_embeddings",
            "output_norm": "transformer.ln_f",
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attention.query_key_value",
            "attn_output": "self_attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        layers="transformer.h",
        layouts={"attn_qkv": "grouped"},
        biased={"attn_qkv": "bias"},
    ),
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        model_type="gpt2",
        keys={
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
            "feed_forward_length": "n_inner",
        },
        names={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        layers="transformer.h",
        layouts=dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), "transposed"),
    ),
    "llama4": Family(
        architecture="Llama4ForCausalLM",
        model_type="llama4_text",
        keys={**LOCAL_EXPERTS, "interleave_moe_layer_step": "interleave_moe_layer_step"},
        names={
            "ffn_gate_inp": "feed_forward.router",
            **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in PARTS},
            **{f"ffn_{part}_exps": f"feed_forward.experts.{{e}}.{part}_proj" for part in PARTS},
            **{f"ffn_{part}_shexp": f"feed_forward.shared_expert.{part}_proj" for part in PARTS},
        },
        stacks={
            **dict.fromkeys(INTO, "feed_forward.experts.gate_up_proj"),
            "ffn_down_exps": "feed_forward.experts.down_proj",
        },
    ),
    "glm4moe": Family(
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        partial=True,
        keys=ROUTED,
        names={**ROUTED_NAMES, "post_attention_norm": "post_attention_layernorm"},
        biased={"attn_q": "attention_bias"},
        weighted={"attn_q_norm": "use_qk_norm"},
    ),
    "dots1": Family(
        architecture="Dots1ForCausalLM",
        model_type="dots1",
        keys=ROUTED,
        names=ROUTED_NAMES,
        fixed={"sliding_window": None},
        biased={"attn_q": "attention_bias"},
    ),
    "ernie4_5-moe": Family(
        architecture="Ernie4_5_MoeForCausalLM",
        model_type="ernie4_5_moe",
        keys={
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_shared_count": "moe_num_shared_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
        },
        names={**ROUTED_NAMES, "exp_probs_b": "mlp.moe_statics.e_score_correction_bias="},
        layouts={"exp_probs_b": "row"},
        biased={"attn_q": "use_bias"},
    ),
    "lfm2moe": Family(
        architecture="Lfm2MoeForCausalLM",
        model_type="lfm2_moe",
        keys={
            **LFM2_KEYS,
            **EXPERTS,
            "expert_feed_forward_length": "moe_intermediate_size",
            "leading_dense_block_count": "num_dense_layers",
            "expert_weights_scale": "routed_scaling_factor",
        },
        names={
            **LFM2_NAMES,
            "ffn_gate_inp": "feed_forward.gate",
            "exp_probs_b": "feed_forward.expert_bias=",
            "ffn_gate_exps": "feed_forward.experts.{e}.w1",
            "ffn_up_exps": "feed_forward.experts.{e}.w3",
            "ffn_down_exps": "feed_forward.experts.{e}.w2",
        },
        layouts={"shortconv.conv": "column"},
    ),
    "minimax-m2": Family(
        architecture="MiniMaxM2ForCausalLM",
        model_type="minimax_m2",
        partial=True,
        keys=LOCAL_EXPERTS,
        names={
            "ffn_gate_inp": "block_sparse_moe.gate",
            "exp_probs_b": "block_sparse_moe.e_score_correction_bias=",
            "ffn_gate_exps": "block_sparse_moe.experts.{e}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{e}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{e}.w2",
        },
    ),
    "phi2": Family(
        architecture="PhiForCausalLM",
        model_type="phi",
        partial=True,
        keys=LAYER_NORM,
        names={
            "output_norm": "model.final_layernorm",
            "attn_output": "self_attn.dense",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
    ),
    "olmo": Family(
        architecture="OlmoForCausalLM",
        model_type="olmo",
        keys={"attention.clamp_kqv": "clip_qkv"},
        permuted=True,
    ),
    "mamba": Family(
        architecture="MambaForCausalLM",
        model_type="mamba",
        keys={**MAMBA_KEYS, "ssm.time_step_rank": "time_step_rank"},
        names={**MAMBA_NAMES, "ssm_x": "mixer.x_proj", "ssm_dt": "mixer.dt_proj"},
        layers="backbone.layers",
        layouts={"ssm_conv1d": "column", "ssm_a": "logarithm"},
        turned=False,
    ),
    "mamba2": Family(
        architecture="Mamba2ForCausalLM",
        model_type="mamba2",
        keys={**MAMBA_KEYS, "ssm.time_step_rank": "num_heads", "ssm.group_count": "n_groups"},
        names={**MAMBA_NAMES, "ssm_dt": "mixer.dt_bias=", "ssm_norm": "mixer.norm"},
        layers="backbone.layers",
        layouts={"ssm_conv1d": "column", "ssm_a": "logarithm", "ssm_d": "flat", "ssm_norm": "flat"},
        turned=False,
    ),
    "qwen35": Family(
        architecture="Qwen3_5ForCausalLM",
        model_type="qwen3_5_text",
        partial=True,
        offset_norms=True,
        keys=DELTA_KEYS,
        names=DELTA_NAMES,
        layouts=DELTA_LAYOUTS,
        sizes=DELTA_SIZES,
    ),
    "qwen35moe": Family(
        architecture="Qwen3_5MoeForCausalLM",
        model_type="qwen3_5_moe_text",
        partial=True,
        offset_norms=True,
        keys={
            **DELTA_KEYS,
            **EXPERTS,
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        names={**DELTA_NAMES, **MOE_NAMES},
        layouts=DELTA_LAYOUTS,
        sizes=DELTA_SIZES,
    ),
}
