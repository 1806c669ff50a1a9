"""BitNet (weights that have been unpacked) against transformers."""

from lmkit.testing import ModelConformance


class TestBitNet(ModelConformance):
    plugin = "model:BitNetForCausalLM"
