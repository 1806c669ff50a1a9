"""MiniMax against transformers."""

from lmkit_testing import ModelConformance, heads

HALF = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}


class TestMiniMaxM2(ModelConformance):
    plugin = "model:MiniMaxM2ForCausalLM"
    values = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    variants = {"half": {"rope_parameters": HALF}}
    published = heads(
        12, 2, 128, rope_parameters={"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5}
    )


class TestMiniMax(ModelConformance):
    plugin = "model:MiniMaxForCausalLM"
    values = {
        "head_dim": 16, "num_local_experts": 4, "layer_types": ["linear_attention", "full_attention"], "block_size": 8,
        "linear_attn_alpha_factor": 1.5, "full_attn_beta_factor": 0.5, "mlp_alpha_factor": 2.0,
    }  # fmt: skip
    published = heads(16, 2, 128)  # transformers turns whole heads, whatever is said
