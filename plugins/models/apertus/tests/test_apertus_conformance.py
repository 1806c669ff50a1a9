"""Apertus against transformers."""

from lmkit_testing import ModelConformance, heads, llama3


class TestApertus(ModelConformance):
    plugin = "model:ApertusForCausalLM"
    variants = {"biases": {"attention_bias": True, "tie_word_embeddings": True}}
    published = heads(8, 2, 128, rope_parameters=llama3(8.0, 12000000.0))
