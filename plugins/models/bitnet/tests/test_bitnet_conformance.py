"""BitNet (weights that have been unpacked) against transformers."""

from lmkit_testing import ModelConformance


class TestBitNet(ModelConformance):
    plugin = "model:BitNetForCausalLM"
    published = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 1}
