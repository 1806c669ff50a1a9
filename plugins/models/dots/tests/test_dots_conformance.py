"""dots.llm1 and Solar Open against transformers."""

from lmkit_testing import ModelConformance, heads

MIX = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}


class TestDots1(ModelConformance):
    plugin = "model:Dots1ForCausalLM"
    values = MIX | {"n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True}
    variants = {"window": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}}
    published = heads(4, 4, 128)


class TestSolarOpen(ModelConformance):
    plugin = "model:SolarOpenForCausalLM"
    values = MIX | {"head_dim": 12, "routed_scaling_factor": 2.0}
    published = heads(16, 2, 128)
