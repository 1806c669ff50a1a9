"""GPT-NeoX and its like against transformers."""

from lmkit.testing import ModelConformance


class TestGptNeoX(ModelConformance):
    plugin = "model:GPTNeoXForCausalLM"
    values = {"hidden_size": 64}
    variants = {"sequential": {"use_parallel_residual": False, "attention_bias": False}}


class TestGptJ(ModelConformance):
    plugin = "model:GPTJForCausalLM"
    values = {"rotary_dim": 8}


class TestCodeGen(ModelConformance):
    plugin = "model:CodeGenForCausalLM"
    values = {"rotary_dim": 8, "num_attention_heads": 8, "hidden_size": 96}


class TestPersimmon(ModelConformance):
    plugin = "model:PersimmonForCausalLM"
    variants = {"no norms": {"qk_layernorm": False, "hidden_act": "gelu"}}
