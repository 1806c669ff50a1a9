"""nanochat against transformers."""

from lmkit.testing import ModelConformance


class TestNanoChat(ModelConformance):
    plugin = "model:NanoChatForCausalLM"
