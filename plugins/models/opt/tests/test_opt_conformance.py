"""OPT and BioGPT against transformers."""

from lmkit.testing import ModelConformance


class TestOpt(ModelConformance):
    plugin = "model:OPTForCausalLM"
    values = {"ffn_dim": 80, "word_embed_proj_dim": 48, "tie_word_embeddings": True}
    variants = {"no bias": {"enable_bias": False, "tie_word_embeddings": False}}
    published = {"hidden_size": 256, "num_attention_heads": 4, "word_embed_proj_dim": 256}


class TestBioGpt(ModelConformance):
    plugin = "model:BioGptForCausalLM"
    values = {"tie_word_embeddings": True}
    published = {"hidden_size": 256, "num_attention_heads": 4}
