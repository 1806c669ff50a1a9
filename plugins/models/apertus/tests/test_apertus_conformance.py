"""Apertus against transformers."""

from lmkit.testing import ModelConformance


class TestApertus(ModelConformance):
    plugin = "model:ApertusForCausalLM"
    variants = {"biases": {"attention_bias": True, "tie_word_embeddings": True}}
