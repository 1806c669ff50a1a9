"""Gemma against transformers."""

import pytest
from lmkit.api import UnsupportedModel
from lmkit.testing import ModelConformance
from lmkit_model_gemma.small import SmallGemma

SMALL = {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 9}


class TestGemma(ModelConformance):
    plugin = "model:GemmaForCausalLM"
    values = {"head_dim": 12, "tie_word_embeddings": True}


class TestGemma2(ModelConformance):
    plugin = "model:Gemma2ForCausalLM"
    values = SMALL
    variants = {"no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None}}


class TestGemma3(ModelConformance):
    plugin = "model:Gemma3ForCausalLM"
    values = SMALL | {"layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True}
    variants = {
        "linear": {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            }
        }
    }


class TestVaultGemma(ModelConformance):
    plugin = "model:VaultGemmaForCausalLM"
    values = SMALL


class TestRecurrentGemma(ModelConformance):
    plugin = "model:RecurrentGemmaForCausalLM"
    values = {"block_types": ["recurrent", "attention"], "attention_window_size": 9, "tie_word_embeddings": True}
    variants = {"wider": {"lru_width": 64, "num_hidden_layers": 3, "attention_bias": True}}


SHARING = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 12, "sliding_window": 9, "hidden_size_per_layer_input": 16, "tie_word_embeddings": True,
}  # fmt: skip


class TestGemma3n(ModelConformance):
    plugin = "model:Gemma3nForCausalLM"
    values = SHARING | {
        "vocab_size_per_layer_input": 80, "altup_num_inputs": 3, "laurel_rank": 8,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.5],
    }  # fmt: skip
    variants = {
        "sizes": {"intermediate_size": [80, 64, 80, 96], "altup_active_idx": 1, "altup_correct_scale": False},
        "nothing shared": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": None},
    }


class TestGemma4(ModelConformance):
    plugin = "model:Gemma4ForCausalLM"
    values = SHARING | {"vocab_size_per_layer_input": 300, "global_head_dim": 24, "use_double_wide_mlp": True}
    variants = {
        "experts": {
            "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "enable_moe_block": True, "num_experts": 4,
            "top_k_experts": 2, "moe_intermediate_size": 32, "final_logit_softcapping": 30.0,
        },
        "keys are values": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    }  # fmt: skip


CONFIG = {
    "architectures": ["Gemma4ForCausalLM"], "vocab_size": 100, "hidden_size": 64, "num_attention_heads": 4,
    "num_hidden_layers": 12, "num_kv_shared_layers": 4, "sliding_window": 9,
}  # fmt: skip


def test_shared_keys_and_values_are_kept_once() -> None:
    """Layers that read those of another have the need of that one, and no memory."""
    info = SmallGemma().describe(CONFIG)
    assert [layer.kv_of for layer in info.layers] == [None] * 8 + [7, 7, 7, 5]
    assert [layers for _, layers in info.kv_groups()] == [(5,), (0, 1, 2, 3, 4, 6, 7)]
    sizes = [spec.bytes_per_block for spec in info.kv_specs(16, "bfloat16")]
    assert sizes == [1 * 4 * 2 * 512 * 16 * 2, 7 * 4 * 2 * 256 * 16 * 2]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_kv_shared_layers": 8}, "num_kv_shared_layers"),  # no full layer is left to read from
        ({"per_layer_config": {"5": {"num_attention_heads": 8}}}, "per_layer_config.5"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"architectures": ["Gemma3nForCausalLM"], "activation_sparsity_pattern": 1.0}, "activation_sparsity_pattern"),
        ({"architectures": ["Gemma3nForCausalLM"], "intermediate_size": [8, 8]}, "intermediate_size"),
        ({"architectures": ["Gemma3nForCausalLM"], "altup_active_idx": 4}, "altup_active_idx"),
    ],
)
def test_unsupported_values_are_refused_by_name(change: dict[str, object], key: str) -> None:
    with pytest.raises(UnsupportedModel) as failure:
        SmallGemma().describe(CONFIG | change)
    assert failure.value.key == key
