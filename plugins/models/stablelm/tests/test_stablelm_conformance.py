"""StableLM against transformers."""

from lmkit.testing import ModelConformance


class TestStableLm(ModelConformance):
    plugin = "model:StableLmForCausalLM"
    values = {"hidden_size": 64}
    variants = {
        "norms": {"qk_layernorm": True, "use_qkv_bias": True},
        "parallel": {"use_parallel_residual": True},
    }
