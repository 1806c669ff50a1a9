"""GLM-4 against transformers."""

from lmkit.testing import ModelConformance, heads


class TestGlm(ModelConformance):
    plugin = "model:GlmForCausalLM"
    values = {"head_dim": 16}
    published = heads(32, 2, 128)


class TestGlm4(ModelConformance):
    plugin = "model:Glm4ForCausalLM"
    values = {"head_dim": 16}
    variants = {"no bias": {"attention_bias": False, "tie_word_embeddings": True}}
    published = heads(32, 2, 128)


MIX = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}


class TestGlm4Moe(ModelConformance):
    plugin = "model:Glm4MoeForCausalLM"
    values = MIX | {"head_dim": 16}
    variants = {"norms": {"use_qk_norm": True, "n_group": 1, "attention_bias": True, "routed_scaling_factor": 2.0}}
    published = heads(24, 2, 128)
