"""Architectures with recurrent state in most layers: short convolutions, Mamba, gated delta nets."""

from __future__ import annotations

from lmkit_loader_gguf.family import EXPERTS, MOE_NAMES, Family

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

RECURRENT = {
    "lfm2": Family(
        architecture="Lfm2ForCausalLM",
        model_type="lfm2",
        keys=LFM2_KEYS,
        names=LFM2_NAMES,
        fixed={"block_auto_adjust_ff_dim": False},
        layouts={"shortconv.conv": "column"},
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
    "qwen3next": Family(
        architecture="Qwen3NextForCausalLM",
        model_type="qwen3_next",
        partial=True,
        offset_norms=True,
        keys={
            **DELTA_KEYS,
            **EXPERTS,
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        names={
            **DELTA_NAMES,
            **MOE_NAMES,
            "attn_qkv": "linear_attn.in_proj_qkvz",
            "ssm_in": "linear_attn.in_proj_qkvz",
            "ssm_ba": "linear_attn.in_proj_ba",
        },
        fixed={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        layouts={"attn_qkv": "gated", "ssm_conv1d": "column", "ssm_a": "logarithm"},
        partners={"attn_qkv": "attn_gate"},
        sizes=DELTA_SIZES,
    ),
}
