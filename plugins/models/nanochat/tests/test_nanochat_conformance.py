"""nanochat against transformers."""

from lmkit_testing import ModelConformance


class TestNanoChat(ModelConformance):
    plugin = "model:NanoChatForCausalLM"
    published = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}
