"""Falcon against transformers."""

from lmkit.testing import ModelConformance


class TestFalcon(ModelConformance):
    plugin = "model:FalconForCausalLM"
    variants = {
        "grouped": {"new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": True},
        "sequential": {"multi_query": False, "parallel_attn": False, "bias": True},
    }
