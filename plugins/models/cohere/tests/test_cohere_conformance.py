"""Command models against transformers."""

from lmkit.testing import ModelConformance


class TestCohere(ModelConformance):
    plugin = "model:CohereForCausalLM"
    values = {"tie_word_embeddings": True}
    variants = {"norms": {"use_qk_norm": True, "logit_scale": 0.5}}


class TestCohere2(ModelConformance):
    plugin = "model:Cohere2ForCausalLM"
    values = {"head_dim": 12, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
