"""GPT-NeoX and its like against transformers."""

from lmkit_testing import ModelConformance


class TestGptNeoX(ModelConformance):
    plugin = "model:GPTNeoXForCausalLM"
    values = {"hidden_size": 64}
    variants = {"sequential": {"use_parallel_residual": False, "attention_bias": False}}
    published = {"hidden_size": 192, "num_attention_heads": 2}


class TestGptJ(ModelConformance):
    plugin = "model:GPTJForCausalLM"
    values = {"rotary_dim": 8}
    published = {"hidden_size": 512, "num_attention_heads": 2, "rotary_dim": 64}


class TestCodeGen(ModelConformance):
    plugin = "model:CodeGenForCausalLM"
    values = {"rotary_dim": 8, "num_attention_heads": 8, "hidden_size": 96}
    published = {"hidden_size": 512, "num_attention_heads": 8, "rotary_dim": 32}


class TestPersimmon(ModelConformance):
    plugin = "model:PersimmonForCausalLM"
    variants = {"no norms": {"qk_layernorm": False, "hidden_act": "gelu"}}
    published = {"hidden_size": 256, "num_attention_heads": 4}
