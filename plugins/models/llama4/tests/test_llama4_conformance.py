"""Llama 4 against transformers."""

from lmkit.testing import ModelConformance


class TestLlama4(ModelConformance):
    plugin = "model:Llama4ForCausalLM"
    values = {
        "head_dim": 12, "num_local_experts": 4, "intermediate_size_mlp": 72, "attention_chunk_size": 8,
        "no_rope_layers": [1, 0], "floor_scale": 8,
    }  # fmt: skip
    variants = {"every other": {"interleave_moe_layer_step": 2, "use_qk_norm": False, "attn_temperature_tuning": False}}
