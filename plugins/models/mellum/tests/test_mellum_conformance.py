"""Mellum against transformers."""

from lmkit_testing import ModelConformance, heads


class TestMellum(ModelConformance):
    plugin = "model:MellumForCausalLM"
    values = {
        "head_dim": 12, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"],
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    }  # fmt: skip
    variants = {"one dense": {"mlp_layer_types": ["dense", "sparse"], "attention_bias": True}}
    published = heads(8, 2, 128)
