"""What is said of an architecture of GGUF files: what its metadata and tensors are called in its own checkpoints.

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
    are in. `partners`: tensors that are one there -> the other.
    `sizes`: keys of what layouts depend on. `rope`: what belongs to rotary positions that are stretched.
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
    partners: Mapping[str, str] = field(default_factory=dict)
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
