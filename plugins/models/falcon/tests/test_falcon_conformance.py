"""Falcon and Falcon-H1 against transformers."""

from lmkit_testing import ModelConformance, heads


class TestFalcon(ModelConformance):
    plugin = "model:FalconForCausalLM"
    variants = {
        "grouped": {"new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": True},
        "sequential": {"multi_query": False, "parallel_attn": False, "bias": True},
        "alibi": {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    }
    published = {"hidden_size": 320, "num_attention_heads": 5}


class TestFalconH1(ModelConformance):
    plugin = "model:FalconH1ForCausalLM"
    values = {
        "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 16,
        "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.7, "attention_in_multiplier": 0.8,
        "attention_out_multiplier": 1.2, "ssm_in_multiplier": 0.9, "ssm_out_multiplier": 0.6,
        "mlp_multipliers": [0.9, 0.4], "ssm_multipliers": [0.4, 0.5, 0.6, 1.5, 0.3],
    }  # fmt: skip
    variants = {
        "norm after": {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_proj_bias": True},
        "norm before": {"mamba_rms_norm": True, "mamba_d_ssm": None, "projectors_bias": True, "attention_bias": True},
    }
    published = heads(8, 2, 64)
