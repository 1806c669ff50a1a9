"""StableLM against transformers."""

from lmkit_testing import ModelConformance


class TestStableLm(ModelConformance):
    plugin = "model:StableLmForCausalLM"
    values = {"hidden_size": 64}
    variants = {
        "norms": {"qk_layernorm": True, "use_qkv_bias": True},
        "parallel": {"use_parallel_residual": True},
    }
    published = {"hidden_size": 160, "num_attention_heads": 2, "num_key_value_heads": 2}


class TestOrion(ModelConformance):
    plugin = "model:OrionForCausalLM"
    family = "StableLmForCausalLM"
    values = {"layer_norm_eps": 1e-5, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}
    published = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}
