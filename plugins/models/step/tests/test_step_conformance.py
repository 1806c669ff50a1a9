"""Step 3.5 against what transformers runs as the text part of Step 3.7, under the keys of its own files."""

import json
from pathlib import Path
from typing import Any

import pytest
from lmkit.api import UnsupportedModel
from lmkit_decoders import ConfigReader
from lmkit_model_step.arch import Step, limits, rope, sparse
from lmkit_testing import ModelConformance
from lmkit_testing.checkpoints import rename

FULL, SLIDING = KINDS = ("full_attention", "sliding_attention")
VISION = {"width": 16, "layers": 1, "heads": 2, "image_size": 28, "patch_size": 14}
ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
STRETCHED = {
    "rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0,
    "high_freq_factor": 8.0,
}  # fmt: skip


def text_alone(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("vi")}


class TestStep3p5(ModelConformance):
    plugin = "model:Step3p5ForCausalLM"
    family = "Step3p7ForConditionalGeneration"
    values = {
        "vision_config": VISION, "num_hidden_layers": 4, "head_dim": 16, "layer_types": [*KINDS, *KINDS],
        "sliding_window": 9, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "n_routed_experts": 6,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "share_expert_dim": 40, "num_sliding_attention_heads": 6,
        "moe_router_scaling_factor": 2.0, "rope_parameters": ROPES,
    }  # fmt: skip
    variants = {
        "limits": {"swiglu_limits": [0.0, 0.0, 0.2, None], "swiglu_limits_shared": [0.3, 0.0, 0.2, 0.0]},
        "stretched": {"rope_parameters": {**ROPES, FULL: {**ROPES[FULL], **STRETCHED}}},
    }
    published = {
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "num_sliding_attention_heads": 24,
    }  # fmt: skip

    @classmethod
    def name_architecture(cls, directory: Path) -> None:
        text = json.loads((directory / "config.json").read_text())["text_config"]
        kinds, ropes = text["layer_types"], text["rope_parameters"]
        stretched = {key: value for key, value in ropes[FULL].items() if key in STRETCHED}
        config = {
            **text, "architectures": [cls.name()], "model_type": "step3p5", "moe_layers_enum": "1,2,3",
            "layer_types": [*kinds, FULL], "num_nextn_predict_layers": 1,
            "num_attention_groups": text["num_key_value_heads"], "num_key_value_heads": None,
            "moe_num_experts": text["n_routed_experts"], "n_routed_experts": None,
            "moe_top_k": text["num_experts_per_tok"], "num_experts_per_tok": None, "rope_parameters": None,
            "rope_theta": [ropes[kind]["rope_theta"] for kind in [*kinds, FULL]],
            "partial_rotary_factors": [ropes[kind]["partial_rotary_factor"] for kind in [*kinds, FULL]],
            "rope_scaling": None if stretched["rope_type"] == "default" else stretched, "yarn_only_types": [FULL],
            "attention_other_setting": {
                "attention_type": SLIDING, "num_attention_heads": text["num_sliding_attention_heads"],
                "num_attention_groups": text["num_key_value_heads"], "head_dim": text["head_dim"],
            },
            "mlp_layer_types": None, "per_layer_config": None, "num_sliding_attention_heads": None,
            "text_config": None, "vision_config": None, "use_head_wise_attn_gate": True, "use_rope_layers": [],
        }  # fmt: skip
        rename(directory, {}, config, text_alone)


SMALL = {"num_hidden_layers": 2, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("read", "given", "key"),
    [
        (lambda r: limits(r, "swiglu_limits"), {"swiglu_limits": [1.0]}, "swiglu_limits"),
        (lambda r: limits(r, "swiglu_limits"), {"swiglu_limits": [-1.0, 2.0]}, "swiglu_limits"),
        (lambda r: rope(r, [FULL, FULL], FULL), {"rope_theta": [1e4, 5e4]}, "rope_theta"),
        (lambda r: rope(r, [FULL, FULL], FULL), {"yarn_only_types": ["some"]}, "yarn_only_types"),
        (sparse, {"moe_layers_enum": "1,x"}, "moe_layers_enum"),
        (sparse, {"moe_layers_enum": 7}, "moe_layers_enum"),
    ],
)
def test_values_that_mean_nothing(read: Any, given: dict[str, Any], key: str) -> None:
    with pytest.raises(UnsupportedModel) as failure:
        read(ConfigReader({**SMALL, **given}))
    assert failure.value.key == key


def test_released_configuration() -> None:
    """Step 3.5 Flash: lists go on for its three drafting layers."""
    kinds = [FULL, SLIDING, SLIDING, SLIDING] * 12
    other = {"attention_type": SLIDING, "num_attention_heads": 96, "num_attention_groups": 8, "head_dim": 128}
    config = {
        "architectures": ["Step3p5ForCausalLM"], "hidden_size": 4096, "intermediate_size": 11264, "vocab_size": 128896,
        "num_hidden_layers": 45, "num_nextn_predict_layers": 3, "num_attention_heads": 64, "num_attention_groups": 8,
        "head_dim": 128, "attention_other_setting": other, "sliding_window": 512, "layer_types": kinds,
        "rope_theta": [5e6 if kind == FULL else 1e4 for kind in kinds], "yarn_only_types": [FULL],
        "partial_rotary_factors": [0.5 if kind == FULL else 1.0 for kind in kinds], "rope_scaling": STRETCHED,
        "moe_layers_enum": ",".join(map(str, range(3, 45))), "moe_num_experts": 288, "moe_top_k": 8,
        "moe_intermediate_size": 1280, "share_expert_dim": 1280, "swiglu_limits": [0.0] * 43 + [7.0, 7.0, 0, 0, 0],
    }  # fmt: skip
    info = Step().describe(config)
    assert round(info.num_parameters / 1e9) == 197
    assert [need.num_q_heads for need, _ in info.kv_groups()] == [64, 96]
    assert info.config["options"]["limits"][-3:] == [0.0, 7.0, 7.0]
