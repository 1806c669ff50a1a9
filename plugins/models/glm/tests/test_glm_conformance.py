"""GLM-4 against transformers."""

from lmkit.testing import ModelConformance


class TestGlm(ModelConformance):
    plugin = "model:GlmForCausalLM"
    values = {"head_dim": 16}


class TestGlm4(ModelConformance):
    plugin = "model:Glm4ForCausalLM"
    values = {"head_dim": 16}
    variants = {"no bias": {"attention_bias": False, "tie_word_embeddings": True}}
