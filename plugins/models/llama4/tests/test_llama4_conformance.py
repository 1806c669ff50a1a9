"""Llama 4 against transformers."""

from lmkit_testing import ModelConformance, heads, llama3


class TestLlama4(ModelConformance):
    plugin = "model:Llama4ForCausalLM"
    values = {
        "head_dim": 12, "num_local_experts": 4, "intermediate_size_mlp": 72, "attention_chunk_size": 8,
        "no_rope_layers": [1, 0], "floor_scale": 8,
    }  # fmt: skip
    variants = {"every other": {"interleave_moe_layer_step": 2, "use_qk_norm": False, "attn_temperature_tuning": False}}
    published = heads(10, 2, 128, rope_parameters=llama3(16.0, 500000.0))


class TestLlama4Text(TestLlama4):
    """Of the model that also sees."""

    plugin = "model:Llama4ForConditionalGeneration"
    values = TestLlama4.values | {
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 16, "patch_size": 4, "vision_output_dim": 16, "projector_input_dim": 16,
            "projector_output_dim": 16,
        }
    }  # fmt: skip
    variants = {}
