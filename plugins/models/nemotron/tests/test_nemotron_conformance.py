"""Nemotron against transformers."""

from lmkit.testing import ModelConformance


class TestNemotron(ModelConformance):
    plugin = "model:NemotronForCausalLM"
    values = {"hidden_size": 64, "head_dim": 16}
    variants = {"biases": {"attention_bias": True, "mlp_bias": True}}
