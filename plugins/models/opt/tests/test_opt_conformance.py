"""OPT and BioGPT against transformers."""

from lmkit_testing import ModelConformance


class TestOpt(ModelConformance):
    plugin = "model:OPTForCausalLM"
    values = {"ffn_dim": 80, "word_embed_proj_dim": 48, "tie_word_embeddings": True}
    variants = {
        "no bias": {"enable_bias": False, "tie_word_embeddings": False},
        "350m": {"word_embed_proj_dim": 24, "do_layer_norm_before": False},
        "untied": {"word_embed_proj_dim": 24, "tie_word_embeddings": False, "_remove_final_layer_norm": True},
        "plain norms": {"layer_norm_elementwise_affine": False},
    }
    published = {"hidden_size": 256, "num_attention_heads": 4, "word_embed_proj_dim": 256}


class TestBioGpt(ModelConformance):
    plugin = "model:BioGptForCausalLM"
    values = {"tie_word_embeddings": True}
    published = {"hidden_size": 256, "num_attention_heads": 4}
