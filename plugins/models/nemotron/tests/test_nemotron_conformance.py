"""Nemotron and Nemotron-H against transformers."""

import pytest
from lmkit.api import UnsupportedModel
from lmkit_decoders import ConfigReader
from lmkit_model_nemotron.hybrid import layer_kinds
from lmkit_testing import ModelConformance, heads


class TestNemotron(ModelConformance):
    plugin = "model:NemotronForCausalLM"
    values = {"hidden_size": 64, "head_dim": 16}
    variants = {"biases": {"attention_bias": True, "mlp_bias": True}}
    published = heads(6, 2, 128)


class TestNemotronH(ModelConformance):
    """`time_step_min`: the library takes it for the lower limit of prompts' time steps, but not of later tokens'."""

    plugin = "model:NemotronHForCausalLM"
    values = {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "head_dim": 12, "mamba_num_heads": 8, "mamba_head_dim": 10, "n_groups": 2, "ssm_state_size": 8,
        "chunk_size": 16, "time_step_min": 1e-9, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40,
    }  # fmt: skip
    variants = {
        "biases": {"use_bias": True, "use_conv_bias": False, "mlp_bias": True, "routed_scaling_factor": 1.5},
        "latent": {"moe_latent_size": 16, "n_group": 2, "norm_topk_prob": False},
        "no experts": {"layers_block_type": ["mlp", "linear_attention", "full_attention"]},
    }
    published = heads(10, 2, 128)


@pytest.mark.parametrize(
    "given", [{"hybrid_override_pattern": "M*-E"}, {"layers_block_type": ["mamba", "attention", "mlp", "moe"]}]
)
def test_kinds_of_older_files(given: dict[str, object]) -> None:
    kinds = ["linear_attention", "full_attention", "mlp", "moe"]
    assert layer_kinds(ConfigReader({"num_hidden_layers": 4, **given})) == kinds


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"hybrid_override_pattern": "M*?"}, "hybrid_override_pattern"),
        ({"layers_block_type": [["mlp"]]}, "layers_block_type"),
        ({}, "hybrid_override_pattern"),
        ({"hybrid_override_pattern": "M*", "num_hidden_layers": 3}, "num_hidden_layers"),
    ],
)
def test_kinds_that_there_are_not(given: dict[str, object], key: str) -> None:
    with pytest.raises(UnsupportedModel) as failure:
        layer_kinds(ConfigReader(given))
    assert failure.value.key == key
