"""GLM-4 against transformers."""

import json
from pathlib import Path
from typing import Any

from lmkit_testing import ModelConformance, heads
from lmkit_testing.checkpoints import fused, half_open, rename, without_gates


class TestGlm(ModelConformance):
    plugin = "model:GlmForCausalLM"
    values = {"head_dim": 16}
    published = heads(32, 2, 128)


class TestGlm4(ModelConformance):
    plugin = "model:Glm4ForCausalLM"
    values = {"head_dim": 16}
    variants = {"no bias": {"attention_bias": False, "tie_word_embeddings": True}}
    published = heads(32, 2, 128)


MIX = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}


class TestGlm4Moe(ModelConformance):
    plugin = "model:Glm4MoeForCausalLM"
    values = MIX | {"head_dim": 16}
    variants = {"norms": {"use_qk_norm": True, "n_group": 1, "attention_bias": True, "routed_scaling_factor": 2.0}}
    published = heads(24, 2, 128)


class TestChatGLM(ModelConformance):
    """What transformers runs as GLM-4, under its own names."""

    plugin = "model:ChatGLMForConditionalGeneration"
    family = "GlmForCausalLM"
    values = {"head_dim": 16, "num_key_value_heads": 2}
    variants = {"theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}}}
    names = {
        "model.embed_tokens": "transformer.embedding.word_embeddings", "lm_head": "transformer.output_layer",
        "model.norm": "transformer.encoder.final_layernorm", "model.layers": "transformer.encoder.layers",
        "self_attn.o_proj": "self_attention.dense", "self_attn.qkv": "self_attention.query_key_value",
        "gate_up_proj": "dense_h_to_4h", "down_proj": "dense_4h_to_h",
    }  # fmt: skip

    @classmethod
    def name_architecture(cls, directory: Path) -> None:
        given = json.loads((directory / "config.json").read_text())
        config = {
            "architectures": [cls.name()], "num_layers": 2, "padded_vocab_size": given["vocab_size"],
            "ffn_hidden_size": 80, "kv_channels": 16, "seq_length": 256, "layernorm_epsilon": 1.5625e-7,
            "multi_query_attention": True, "multi_query_group_num": 2, "add_qkv_bias": True,
            "rope_ratio": given["rope_parameters"]["rope_theta"] / 1e4,
        }  # fmt: skip
        rename(directory, cls.names, config, lambda tensors: fused(tensors, ("q_proj", "k_proj", "v_proj"), "qkv"))


class TestChatGLMModel(TestChatGLM):
    plugin = "model:ChatGLMModel"


BAILING = {
    "model.embed_tokens": "model.word_embeddings", "self_attn.o_proj": "attention.dense",
    "self_attn.qkv": "attention.query_key_value", "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm", "gate.e_score_correction_bias": "gate.expert_bias",
    "shared_expert.": "shared_experts.",
}  # fmt: skip


class TestBailingV2(ModelConformance):
    """What transformers runs as GLM-4.5, under its own names."""

    plugin = "model:BailingMoeV2ForCausalLM"
    family = "Glm4MoeForCausalLM"
    values = {
        "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 4,
        "topk_group": 2, "first_k_dense_replace": 1, "use_qk_norm": True, "n_shared_experts": 1, "rms_norm_eps": 1e-6,
        "routed_scaling_factor": 2.5,
    }  # fmt: skip

    @classmethod
    def name_architecture(cls, directory: Path) -> None:
        config = {
            "architectures": [cls.name()], "num_experts": 8, "num_shared_experts": 1, "n_routed_experts": None,
            "num_nextn_predict_layers": 0,
        }  # fmt: skip
        rename(directory, BAILING, config, lambda tensors: fused(tensors, ("q_proj", "k_proj", "v_proj"), "qkv"))


class TestBailing(ModelConformance):
    """What transformers runs as Qwen2-MoE, whose shared expert has a gate: one that is always half open."""

    plugin = "model:BailingMoeForCausalLM"
    family = "Qwen2MoeForCausalLM"
    values = {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "qkv_bias": False,
        "shared_expert_intermediate_size": 48, "norm_topk_prob": True,
    }  # fmt: skip
    variants = {"weights as they are": {"norm_topk_prob": False}}
    published = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    skip = {"test_number_of_parameters_is_exact": "the other one has gates"}

    @classmethod
    def name_architecture(cls, directory: Path) -> None:
        half_open(directory)
        config = {"architectures": [cls.name()], "num_shared_experts": 2}
        rename(directory, BAILING, config, cls.change)

    @classmethod
    def change(cls, tensors: dict[str, Any]) -> dict[str, Any]:
        return fused(without_gates(tensors), ("q_proj", "k_proj", "v_proj"), "qkv")
