"""Qwen2 and Qwen3 against transformers."""

import pytest
from lmkit.api import UnsupportedModel
from lmkit_model_qwen.arch import Qwen
from lmkit_testing import ModelConformance, heads

SLIDING = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}


class TestQwen2(ModelConformance):
    plugin = "model:Qwen2ForCausalLM"
    family = "qwen2"
    variants = {"untied": {"tie_word_embeddings": False}, "sliding": SLIDING}
    published = heads(14, 2, 128)


class TestQwen3(ModelConformance):
    plugin = "model:Qwen3ForCausalLM"
    family = "qwen3"
    variants = {"tied": {"tie_word_embeddings": True}, "biases": {"attention_bias": True}, "sliding": SLIDING}
    published = heads(8, 2, 128)


MIX = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


class TestQwen2Moe(ModelConformance):
    plugin = "model:Qwen2MoeForCausalLM"
    values = MIX | {"num_experts": 4, "shared_expert_intermediate_size": 40}
    variants = {"one layer": {"mlp_only_layers": [0], "norm_topk_prob": True}}
    published = heads(14, 2, 128)


class TestQwen3Moe(ModelConformance):
    plugin = "model:Qwen3MoeForCausalLM"
    values = MIX | {"num_experts": 4, "head_dim": 12, "norm_topk_prob": True}
    variants = {"one layer": {"decoder_sparse_step": 2, "norm_topk_prob": False, "attention_bias": True}}
    published = heads(16, 2, 128)


CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def windows(**change: object) -> list[int | None]:
    return [layer.attn.window for layer in Qwen().describe(CONFIG | change).layers]


def test_window_layers() -> None:
    assert windows() == [None, None, None]
    assert windows(sliding_window=8, max_window_layers=0) == [None, None, None]  # not in use
    assert windows(use_sliding_window=True, sliding_window=8, max_window_layers=1) == [None, 8, 8]
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(use_sliding_window=True, sliding_window=8, layer_types=types) == [8, None, 8]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "full_attention", "mamba"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_window"),
        ({"use_sliding_window": 1}, "use_sliding_window"),
        ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": "all"}, "max_window_layers"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "rope_scaling.rope_type"),
    ],
)
def test_unsupported_values_are_refused_by_name(change: dict[str, object], key: str) -> None:
    with pytest.raises(UnsupportedModel) as failure:
        Qwen().describe(CONFIG | change)
    assert failure.value.key == key


class TestMiMo(ModelConformance):
    plugin = "model:MiMoForCausalLM"
    family = "qwen2"
    values = {"tie_word_embeddings": False}
    published = heads(8, 2, 128)


HYBRID = {
    "head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
}  # fmt: skip
MIX = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 40}


class TestQwen3Next(ModelConformance):
    plugin = "model:Qwen3NextForCausalLM"
    values = HYBRID | MIX
    variants = {"dense last": {"mlp_only_layers": [1], "layer_types": ["full_attention", "linear_attention"]}}
    published = heads(16, 2, 256, linear_key_head_dim=128, linear_value_head_dim=128)


class TestQwen35(ModelConformance):
    plugin = "model:Qwen3_5ForCausalLM"
    values = HYBRID
    published = heads(12, 2, 256, linear_key_head_dim=128, linear_value_head_dim=128)


class TestQwen35Moe(ModelConformance):
    plugin = "model:Qwen3_5MoeForCausalLM"
    values = HYBRID | MIX
    published = heads(16, 2, 256, linear_key_head_dim=128, linear_value_head_dim=128)


SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}}
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "patch_size": 4, "out_hidden_size": 48,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0],
}  # fmt: skip


class TestQwen2VL(ModelConformance):
    """The text part of what also sees: here positions have one axis instead of three."""

    plugin = "model:Qwen2VLForConditionalGeneration"
    values = SECTIONS | {"vision_config": {**VISION, "embed_dim": 16, "hidden_size": 48}}
    published = {
        "hidden_size": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
    }


class TestQwen25VL(ModelConformance):
    plugin = "model:Qwen2_5_VLForConditionalGeneration"
    values = SECTIONS | {"vision_config": VISION, "tie_word_embeddings": True}
    published = {
        "hidden_size": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
    }


class TestQwen3VL(ModelConformance):
    plugin = "model:Qwen3VLForConditionalGeneration"
    values = SECTIONS | {"vision_config": VISION, "head_dim": 12}
    published = heads(
        8, 2, 128, rope_parameters={"rope_type": "default", "rope_theta": 5000000.0, "mrope_section": [24, 20, 20]}
    )


class TestQwen35Text(ModelConformance):
    plugin = "model:Qwen3_5ForConditionalGeneration"
    values = HYBRID | {"vision_config": VISION}
    published = heads(12, 2, 256, linear_key_head_dim=128, linear_value_head_dim=128)


class TestQwen35MoeText(ModelConformance):
    plugin = "model:Qwen3_5MoeForConditionalGeneration"
    values = HYBRID | MIX | {"vision_config": VISION}
    published = heads(16, 2, 256, linear_key_head_dim=128, linear_value_head_dim=128)
