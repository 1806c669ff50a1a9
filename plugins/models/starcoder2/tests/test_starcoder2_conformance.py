"""StarCoder2 against transformers."""

from lmkit_testing import ModelConformance, heads


class TestStarcoder2(ModelConformance):
    plugin = "model:Starcoder2ForCausalLM"
    variants = {"window": {"sliding_window": 9, "use_bias": False, "tie_word_embeddings": True}}
    published = heads(24, 2, 128)
