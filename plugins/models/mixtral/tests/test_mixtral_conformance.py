"""Mixtral and Phi-MoE against transformers."""

from lmkit_testing import ModelConformance, heads


class TestMixtral(ModelConformance):
    plugin = "model:MixtralForCausalLM"
    values = {"num_local_experts": 4, "head_dim": 12}
    variants = {"window": {"sliding_window": 9}}
    published = heads(8, 2, 128)


class TestPhiMoE(ModelConformance):
    plugin = "model:PhimoeForCausalLM"
    values = {"num_local_experts": 4, "router_jitter_noise": 0.3}
    variants = {"biases": {"attention_bias": True, "lm_head_bias": True}}
    published = heads(8, 2, 128)


class TestPhiMoEAsReleased(ModelConformance):
    plugin = "model:PhiMoEForCausalLM"
    family = "PhimoeForCausalLM"
    values = {"num_local_experts": 4}
    published = heads(8, 2, 128)
