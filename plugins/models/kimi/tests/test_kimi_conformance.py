"""Kimi Linear against transformers."""

import pytest
from lmkit.api import UnsupportedModel
from lmkit_decoders import ConfigReader
from lmkit_model_kimi.arch import delta_attention
from lmkit_testing import ModelConformance

FULL, LINEAR = "full_attention", "linear_attention"


class TestKimiLinear(ModelConformance):
    plugin = "model:KimiLinearForCausalLM"
    values = {
        "num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR], "linear_head_dim": 8, "linear_num_heads": 4,
        "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8, "num_experts": 4,
        "num_experts_per_token": 2, "moe_intermediate_size": 24, "num_key_value_heads": 4,
    }  # fmt: skip
    variants = {
        "other": {
            "q_lora_rank": 12, "mlp_layer_types": ["sparse", "dense", "sparse"], "num_expert_group": 2,
            "moe_renormalize": False, "linear_conv_kernel_dim": 3,
        },
    }  # fmt: skip
    published = {
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "linear_head_dim": 128,
        "linear_num_heads": 2,
    }


OLD = {"full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4}
GIVEN = {"hidden_size": 48, "num_hidden_layers": 3}


def test_layers_of_older_files_are_counted_from_one() -> None:
    assert delta_attention(ConfigReader({**GIVEN, "linear_attn_config": OLD})).layers == (True, False, True)


@pytest.mark.parametrize("change", [{"full_attn_layers": 2}, {"kda_layers": [1]}, {"num_heads": 0}])
def test_what_older_files_cannot_say(change: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModel, match=next(iter(change))):
        delta_attention(ConfigReader({**GIVEN, "linear_attn_config": {**OLD, **change}}))
