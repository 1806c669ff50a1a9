"""DBRX against transformers."""

from lmkit_testing import ModelConformance

FFN = {"hidden_size": 48, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}


class TestDbrx(ModelConformance):
    plugin = "model:DbrxForCausalLM"
    tolerance = 5e-4  # the library's float32 is off from its float64 by up to 1.5e-4
    values = {
        "d_model": 48,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 10000.0},
        "ffn_config": FFN,
    }
    variants = {
        "weights as they are": {
            "attn_config": {"kv_n_heads": 4, "clip_qkv": 100.0, "rope_theta": 10000.0},
            "ffn_config": FFN | {"moe_normalize_expert_weights": None, "ffn_act_fn": {"name": "gelu"}},
        }
    }
    published = {
        "d_model": 768,
        "n_heads": 6,
        "hidden_size": 768,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 500000.0},
        "ffn_config": {"hidden_size": 768, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    }
