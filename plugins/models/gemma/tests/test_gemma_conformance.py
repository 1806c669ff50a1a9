"""Gemma against transformers."""

import json
from pathlib import Path

import pytest
import torch
from lmkit.api import UnsupportedModel
from lmkit_model_gemma.small import SmallGemma
from lmkit_testing import ModelConformance, heads
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.model import load_tiny, prompt
from lmkit_testing.steps import ModelDriver
from safetensors.torch import load_file, save_file

SMALL = {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 9}


class TestGemma(ModelConformance):
    plugin = "model:GemmaForCausalLM"
    values = {"head_dim": 12, "tie_word_embeddings": True}
    published = heads(8, 1, 256)


class TestGemma2(ModelConformance):
    plugin = "model:Gemma2ForCausalLM"
    values = SMALL
    variants = {"no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None}}
    published = heads(4, 2, 256, query_pre_attn_scalar=256)


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
    published = heads(
        4,
        2,
        256,
        query_pre_attn_scalar=256,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    )


VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip


class TestGemma3Text(TestGemma3):
    """Of the model that also sees."""

    plugin = "model:Gemma3ForConditionalGeneration"
    values = TestGemma3.values | {"vision_config": VISION}
    variants = {}


class TestVaultGemma(ModelConformance):
    plugin = "model:VaultGemmaForCausalLM"
    values = SMALL
    published = heads(4, 4, 256, query_pre_attn_scalar=256)


class TestRecurrentGemma(ModelConformance):
    plugin = "model:RecurrentGemmaForCausalLM"
    tolerance = 2e-3  # the library's float32 is off from its float64 by up to 7e-4
    values = {"block_types": ["recurrent", "attention"], "attention_window_size": 9, "tie_word_embeddings": True}
    variants = {"wider": {"lru_width": 64, "num_hidden_layers": 3, "attention_bias": True}}
    published = {"hidden_size": 512, "num_attention_heads": 2, "num_key_value_heads": 1}


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
    published = heads(8, 2, 256)


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
    published = heads(4, 2, 256, global_head_dim=512)


class TestGemma4Text(TestGemma4):
    plugin = "model:Gemma4ForConditionalGeneration"
    values = TestGemma4.values | {"vision_config": VISION | {"head_dim": 8}, "audio_config": None}
    variants = {}


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


def test_gemma3n_that_also_sees_and_hears(tmp_path: Path) -> None:
    """The text part gives what the text model gives, whichever names its tensors have. (The whole needs a library for
    vision in transformers.)"""
    source = tiny_checkpoint("Gemma3nForCausalLM", tmp_path / "text", **TestGemma3n.values)
    wanted = logits(source)
    config = json.loads((source / "config.json").read_text())
    whole = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "text_config": {k: v for k, v in config.items() if k not in ("architectures", "eos_token_id")},
        "eos_token_id": 7,
    }
    tensors = load_file(source / "model.safetensors")
    for i, before in enumerate(("model.language_model.", "language_model.model.")):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(whole))
        renamed = {name.replace("model.", before, 1): tensor for name, tensor in tensors.items()}
        vision = {"model.vision_tower.timm_model.conv.weight": torch.zeros(3)}
        save_file(renamed | vision, folder / "model.safetensors")
        assert torch.equal(logits(folder), wanted)
        assert SmallGemma().describe(whole).eos_token_ids == (7,)


def logits(folder: Path) -> torch.Tensor:
    loaded = load_tiny(folder, "lmkit_model_gemma.small:SmallGemma", "float32")
    return ModelDriver(loaded, "float32").run(0, prompt(97), 29)
