"""gpt-oss against transformers."""

from lmkit_testing import ModelConformance, heads

DEFAULT = {"rope_type": "default", "rope_theta": 150000.0}


class TestGptOss(ModelConformance):
    plugin = "model:GptOssForCausalLM"
    values = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 9}
    variants = {"plain positions": {"rope_parameters": DEFAULT}}
    published = heads(16, 2, 64)
