"""GPT-2 and its like against transformers."""

from lmkit_testing import ModelConformance


class TestGpt2(ModelConformance):
    plugin = "model:GPT2LMHeadModel"
    values = {"tie_word_embeddings": True}
    variants = {
        "untied": {"tie_word_embeddings": False, "n_inner": 72, "scale_attn_weights": False},
        "deeper, flatter": {"scale_attn_by_inverse_layer_idx": True},
    }
    published = {"hidden_size": 256, "num_attention_heads": 4}


class TestGptNeo(ModelConformance):
    plugin = "model:GPTNeoForCausalLM"
    values = {"attention_types": [[["global", "local"], 1]], "window_size": 9, "tie_word_embeddings": True}
    published = {"hidden_size": 256, "num_attention_heads": 2}


class TestGptBigCode(ModelConformance):
    plugin = "model:GPTBigCodeForCausalLM"
    values = {"tie_word_embeddings": True}
    variants = {"heads": {"multi_query": False}}
    published = {"hidden_size": 384, "num_attention_heads": 3}
