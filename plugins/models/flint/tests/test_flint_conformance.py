"""Flint against transformers."""

from lmkit_testing import ModelConformance, heads


class TestFlint(ModelConformance):
    plugin = "model:FlintForCausalLM"
    values = {
        "head_dim": 12, "sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"],
        "mlp_only_layers": [0], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 40,
    }  # fmt: skip
    variants = {"no dense": {"mlp_only_layers": [], "norm_topk_prob": False, "attention_bias": True}}
    published = heads(8, 2, 128)
