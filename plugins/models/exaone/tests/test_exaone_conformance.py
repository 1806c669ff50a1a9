"""EXAONE 4 against transformers."""

from lmkit.testing import ModelConformance


class TestExaone4(ModelConformance):
    plugin = "model:Exaone4ForCausalLM"
    values = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
    variants = {"no window": {"sliding_window": None, "layer_types": ["full_attention"] * 2}}


class TestExaoneMoe(ModelConformance):
    plugin = "model:ExaoneMoeForCausalLM"
    values = {
        "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"], "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    }  # fmt: skip


class TestExaoneMoE(TestExaoneMoe):
    plugin = "model:ExaoneMoEForCausalLM"
    family = "ExaoneMoeForCausalLM"
