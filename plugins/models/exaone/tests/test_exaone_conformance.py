"""EXAONE 4 against transformers."""

import json
from pathlib import Path

from lmkit_testing import ModelConformance, heads, llama3
from lmkit_testing.checkpoints import rename


class TestExaone4(ModelConformance):
    plugin = "model:Exaone4ForCausalLM"
    values = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
    variants = {"no window": {"sliding_window": None, "layer_types": ["full_attention"] * 2}}
    published = heads(10, 2, 128, rope_parameters=llama3(16.0, 1000000.0))


class TestExaoneMoe(ModelConformance):
    plugin = "model:ExaoneMoeForCausalLM"
    values = {
        "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"], "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    }  # fmt: skip
    published = heads(16, 2, 128)


class TestExaoneMoE(TestExaoneMoe):
    plugin = "model:ExaoneMoEForCausalLM"
    family = "ExaoneMoeForCausalLM"


class TestExaone3(ModelConformance):
    """What transformers runs as Llama, under its own names."""

    plugin = "model:ExaoneForCausalLM"
    family = "llama"
    variants = {"tied": {"tie_word_embeddings": True, "hidden_act": "gelu"}}
    published = heads(8, 2, 128)

    @classmethod
    def name_architecture(cls, directory: Path) -> None:
        names = {
            "model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f", "model.layers": "transformer.h",
            "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2",
            "self_attn.o_proj": "attn.attention.out_proj", "self_attn": "attn.attention", "gate_proj": "c_fc_0",
            "up_proj": "c_fc_1", "down_proj": "c_proj",
        }  # fmt: skip
        config = {"architectures": ["ExaoneForCausalLM"], "num_layers": 2, "layer_norm_epsilon": 1e-6}
        act = json.loads((directory / "config.json").read_text())["hidden_act"]
        rename(directory, names, {**config, "activation_function": act, "num_hidden_layers": None})
