"""Mistral Large 3 against what transformers runs as Mistral 4, under its own names."""

import json
from pathlib import Path
from typing import Any

import pytest
from lmkit.api import UnsupportedModel
from lmkit_decoders import ConfigReader
from lmkit_model_deepseek.mistral import MistralLarge3, yarn
from lmkit_testing import ModelConformance
from lmkit_testing.checkpoints import rename

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 8,
    "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1, "llama_4_scaling_beta": 0.3,
}  # fmt: skip
NAMES = {
    "model.": "", "embed_tokens": "tok_embeddings", "lm_head": "output", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.": "attention.", "q_a_proj": "wq_a", "q_b_proj": "wq_b",
    "q_a_layernorm": "q_a_norm", "kv_a_layernorm": "kv_a_norm", "kv_a_proj_with_mqa": "wkv_a_with_mqa",
    "kv_b_proj": "wkv_b", "q_proj": "wq", "o_proj": "wo", "mlp.experts": "experts",
    "mlp.shared_experts": "shared_experts",
    "mlp.gate.": "gate.", "mlp.": "feed_forward.", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3",
}  # fmt: skip


def unstacked(tensors: dict[str, Any]) -> dict[str, Any]:
    """Each expert by itself."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            at, _, kind = name.rpartition(".")
            for e, expert in enumerate(tensor):
                halves = expert.chunk(2) if kind == "gate_up_proj" else (expert,)
                parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
                found |= {f"{at}.{e}.{part}.weight": half for part, half in zip(parts, halves, strict=True)}
        else:
            found[name] = tensor
    return found


class TestMistralLarge3(ModelConformance):
    plugin = "model:MistralLarge3ForCausalLM"
    family = "Mistral4ForCausalLM"
    values = {
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
        "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "rope_parameters": YARN,
    }  # fmt: skip
    variants = {"scaled": {"routed_scaling_factor": 1.5, "num_experts_per_tok": 3, "tie_word_embeddings": True}}
    published = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}

    @classmethod
    def name_architecture(cls, directory: Path) -> None:
        given = json.loads((directory / "config.json").read_text())
        rope = {key: given["rope_parameters"][key] for key in YARN if key not in ("mscale", "llama_4_scaling_beta")}
        config = {
            "architectures": [cls.name()], "scoring_func": "softmax", "topk_method": None, "moe_layer_freq": 1,
            "llama_4_scaling": {"original_max_position_embeddings": 8, "beta": 0.3}, "rope_parameters": rope,
            "hidden_size": None, "dim": given["hidden_size"], "rms_norm_eps": None, "norm_eps": given["rms_norm_eps"],
        }  # fmt: skip
        rename(directory, NAMES, config, unstacked)


def test_scaling_that_is_not_applied() -> None:
    """Neither attention nor what it reads is scaled then."""
    given = {key: value for key, value in YARN.items() if key != "llama_4_scaling_beta"}
    sharp, plain = (
        yarn(ConfigReader({"rope_parameters": {**given, "apply_yarn_scaling": on}})) for on in (True, False)
    )
    assert (sharp["mscale_all_dim"], plain["mscale_all_dim"]) == (1.0, 0.0)
    assert (sharp["attention_factor"], plain["attention_factor"]) == (1.0, 1.0)


@pytest.mark.parametrize(
    "given", [{"scoring_func": "sigmoid"}, {"topk_method": "noaux_tc"}, {"moe_layer_freq": 2}, {"n_group": 4}]
)
def test_other_routers_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel) as failure:
        MistralLarge3().describe({"architectures": ["MistralLarge3ForCausalLM"], **given})
    assert [failure.value.key] == list(given)
