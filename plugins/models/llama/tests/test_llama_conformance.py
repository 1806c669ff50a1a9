"""Llama and Mistral against transformers."""

import json
import shutil
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from lmkit.api import UnsupportedModel
from lmkit_model_llama.arch import Llama
from lmkit_testing import ModelConformance, heads, llama3
from safetensors.torch import load_file, save_file

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


class TestLlama(ModelConformance):
    plugin = "model:LlamaForCausalLM"
    family = "llama"
    variants = {
        "tied": {"tie_word_embeddings": True},
        "biases": {"attention_bias": True, "mlp_bias": True},
        "head_dim": {"head_dim": 20, "num_key_value_heads": 1},
        "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
        "llama3": {"rope_parameters": LLAMA3},
        "yarn": {"rope_parameters": YARN},
        "yarn-attention-factor": {"rope_parameters": YARN | {"attention_factor": 0.7, "truncate": False}},
    }
    published = heads(8, 2, 128, rope_parameters=llama3(8.0, 500000.0))


class TestMistral(ModelConformance):
    plugin = "model:MistralForCausalLM"
    family = "mistral"
    variants = {"no-window": {"sliding_window": None}, "head_dim": {"head_dim": 32}}
    published = heads(8, 2, 128)


class TestMinistral(ModelConformance):
    plugin = "model:MinistralForCausalLM"
    values = {"head_dim": 12, "sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"]}
    published = heads(8, 2, 128)


class TestMinistral3(ModelConformance):
    plugin = "model:Ministral3ForCausalLM"
    values = {
        "head_dim": 12,
        "rope_parameters": YARN
        | {"llama_4_scaling_beta": 0.3, "factor": 16.0}
        | {"original_max_position_embeddings": 8},
    }
    published = heads(8, 2, 128)


VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip


class TestMistral3(ModelConformance):
    plugin = "model:Mistral3ForConditionalGeneration"
    values = {"model_type": "mistral", "head_dim": 12, "vision_config": VISION}
    variants = {"ministral": TestMinistral3.values | {"model_type": "ministral3"}}
    published = heads(8, 2, 128)


class TestSmolLM3(ModelConformance):
    plugin = "model:SmolLM3ForCausalLM"
    values = {"no_rope_layers": [1, 0]}
    variants = {"sliding": {"use_sliding_window": True, "sliding_window": 9, "tie_word_embeddings": True}}
    published = heads(8, 2, 128)


class TestArcee(ModelConformance):
    plugin = "model:ArceeForCausalLM"
    values = {"head_dim": 12}
    published = heads(
        10,
        2,
        128,
        hidden_size=40,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 20.0,
            "original_max_position_embeddings": 4096,
        },
    )


class TestSeedOss(ModelConformance):
    plugin = "model:SeedOssForCausalLM"
    values = {"head_dim": 16}
    published = heads(20, 2, 128)


class TestCwm(ModelConformance):
    plugin = "model:CwmForCausalLM"
    values = {"head_dim": 16, "sliding_window": 9, "rope_parameters": LLAMA3}
    published = heads(12, 2, 128)


class TestHelium(ModelConformance):
    plugin = "model:HeliumForCausalLM"
    values = {"head_dim": 12}
    published = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}


class TestJais2(ModelConformance):
    plugin = "model:Jais2ForCausalLM"
    values = {"head_dim": 12}
    published = heads(2, 2, 128)


class TestInternLM3(ModelConformance):
    """Its file has names of its own for what transformers runs as Llama."""

    plugin = "model:InternLM3ForCausalLM"
    family = "llama"
    values = {"head_dim": 16}
    variants = {"biases": dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "bias"), True)}
    published = heads(
        32, 2, 128, hidden_size=64, rope_parameters={"rope_type": "dynamic", "rope_theta": 50000000.0, "factor": 6.0}
    )


class TestInternLM2(ModelConformance):
    """What transformers runs as Llama, under the names and in the order of its own files."""

    plugin = "model:InternLM2ForCausalLM"
    family = "llama"
    values = {"attention_bias": True, "bias": True}
    variants = {"no-bias": {"attention_bias": False, "bias": False}, "one-group": {"num_key_value_heads": 1}}
    published = heads(8, 2, 128)

    names: ClassVar = {
        "model.embed_tokens": "model.tok_embeddings", "lm_head": "output", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2", "self_attn.q_proj": "attention.wqkv",
    }  # fmt: skip

    @classmethod
    def name_architecture(cls, directory: Path) -> None:
        shutil.copytree(directory, directory / "transformers")
        super().name_architecture(directory)
        config = json.loads((directory / "config.json").read_text())
        num_kv = config["num_key_value_heads"]
        file = directory / "model.safetensors"
        tensors = load_file(file)
        for name in [name for name in tensors if ".q_proj." in name]:
            parts = [tensors.pop(name.replace("q_proj", f"{part}_proj")).unflatten(0, (num_kv, -1)) for part in "qkv"]
            tensors[name] = torch.cat(parts, 1).flatten(0, 1)
        for old, new in cls.names.items():
            tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        save_file(tensors, file)


class TestIQuestCoder(ModelConformance):
    plugin = "model:IQuestCoderForCausalLM"
    family = "llama"
    values = {"head_dim": 16}
    published = heads(10, 2, 128, hidden_size=40)


class TestMiniCPM(ModelConformance):
    """Granite multiplies the same places."""

    plugin = "model:MiniCPMForCausalLM"
    family = "GraniteForCausalLM"
    values = {
        "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 24, "embedding_multiplier": 12.0,
        "residual_multiplier": 1.4 / 2**0.5, "attention_multiplier": 12**-0.5, "logits_scaling": 2.0,
    }  # fmt: skip
    published = heads(2, 2, 64, attention_multiplier=0.125)


class TestOldLlama(ModelConformance):
    plugin = "model:LLaMAForCausalLM"
    family = "llama"
    published = heads(2, 2, 128)


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_defaults_of_old_files() -> None:
    """Keys that old configurations leave out take transformers' defaults; rope_scaling is read too."""
    scaling = {"type": "linear", "factor": 2.0}
    info = Llama().describe(CONFIG | {"rope_theta": 5000.0, "rope_scaling": scaling, "torch_dtype": "float16"})
    assert info.config["rope"] == {"rope_type": "linear", "theta": 5000.0, "partial": 1.0, "factor": 2.0}
    assert (info.layers[0].attn.num_kv_heads, info.layers[0].attn.head_dim, info.dtype) == (4, 16, "float16")
    assert info.max_length == 2048


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"hidden_act": "swish2"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "twist": 1}}, "rope_parameters.twist"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
        ({"dtype": "int8"}, "dtype"),
        ({"architectures": ["GrokForCausalLM"]}, "architectures"),
    ],
)
def test_unsupported_values_are_refused_by_name(change: dict[str, object], key: str) -> None:
    with pytest.raises(UnsupportedModel) as failure:
        Llama().describe(CONFIG | change)
    assert failure.value.key == key
