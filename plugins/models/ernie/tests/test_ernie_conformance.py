"""ERNIE 4.5 against transformers."""

from lmkit.testing import ModelConformance


class TestErnie(ModelConformance):
    plugin = "model:Ernie4_5ForCausalLM"
    values = {"head_dim": 16, "tie_word_embeddings": True}
    variants = {"biases": {"use_bias": True, "tie_word_embeddings": False}}
