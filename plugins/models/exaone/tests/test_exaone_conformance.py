"""EXAONE 4 against transformers."""

from lmkit.testing import ModelConformance, heads, llama3


class TestExaone4(ModelConformance):
    plugin = "model:Exaone4ForCausalLM"
    values = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
    variants = {"no window": {"sliding_window": None, "layer_types": ["full_attention"] * 2}}
    published = heads(10, 2, 128, rope_parameters=llama3(16.0, 1000000.0))


class TestExaoneMoe(ModelConformance):
    plugin = "model:ExaoneMoeForCausalLM"
    values = {
        "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"], "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    }  # fmt: skip
    published = heads(16, 2, 128)


class TestExaoneMoE(TestExaoneMoe):
    plugin = "model:ExaoneMoEForCausalLM"
    family = "ExaoneMoeForCausalLM"
