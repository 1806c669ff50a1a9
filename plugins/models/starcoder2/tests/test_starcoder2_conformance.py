"""StarCoder2 against transformers."""

from lmkit.testing import ModelConformance


class TestStarcoder2(ModelConformance):
    plugin = "model:Starcoder2ForCausalLM"
    variants = {"window": {"sliding_window": 9, "use_bias": False, "tie_word_embeddings": True}}
