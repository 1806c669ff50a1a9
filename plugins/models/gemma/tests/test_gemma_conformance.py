"""Gemma against transformers."""

from lmkit.testing import ModelConformance

SMALL = {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 9}


class TestGemma(ModelConformance):
    plugin = "model:GemmaForCausalLM"
    values = {"head_dim": 12, "tie_word_embeddings": True}


class TestGemma2(ModelConformance):
    plugin = "model:Gemma2ForCausalLM"
    values = SMALL
    variants = {"no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None}}


class TestGemma3(ModelConformance):
    plugin = "model:Gemma3ForCausalLM"
    values = SMALL | {"layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True}
    variants = {
        "linear": {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            }
        }
    }


class TestVaultGemma(ModelConformance):
    plugin = "model:VaultGemmaForCausalLM"
    values = SMALL


class TestRecurrentGemma(ModelConformance):
    plugin = "model:RecurrentGemmaForCausalLM"
    values = {"block_types": ["recurrent", "attention"], "attention_window_size": 9, "tie_word_embeddings": True}
    variants = {"wider": {"lru_width": 64, "num_hidden_layers": 3, "attention_bias": True}}
