"""BLOOM and MPT against transformers."""

from lmkit_testing import ModelConformance


class TestBloom(ModelConformance):
    plugin = "model:BloomForCausalLM"
    values = {"tie_word_embeddings": True}
    variants = {"six heads": {"num_attention_heads": 6}}
    published = {"hidden_size": 256, "num_attention_heads": 4}


class TestMpt(ModelConformance):
    plugin = "model:MptForCausalLM"
    values = {"tie_word_embeddings": True, "max_seq_len": 256}
    variants = {"clip": {"attn_config": {"clip_qkv": 2.0, "softmax_scale": 0.3}, "num_attention_heads": 6}}
    published = {"hidden_size": 256, "num_attention_heads": 2}
