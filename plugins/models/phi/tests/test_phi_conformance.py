"""Phi against transformers."""

from lmkit_testing import ModelConformance

LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.5, 2.0, 2.5, 3.0, 3.5, 4.0],
}


class TestPhi(ModelConformance):
    plugin = "model:PhiForCausalLM"
    values = {"hidden_size": 64}
    variants = {"norms": {"qk_layernorm": True}}
    published = {
        "hidden_size": 160,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.4},
    }


class TestPhi3(ModelConformance):
    plugin = "model:Phi3ForCausalLM"
    variants = {
        "window": {"sliding_window": 9},
        "long": {"rope_parameters": LONG, "original_max_position_embeddings": 8},
        "short": {"rope_parameters": LONG, "original_max_position_embeddings": 256},
        "partial": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    }
    published = {
        "hidden_size": 384, "num_attention_heads": 3, "num_key_value_heads": 1, "original_max_position_embeddings": 256,
        "rope_parameters": LONG | {
            "short_factor": [1.0] * 48, "long_factor": [1 + i / 8 for i in range(48)], "partial_rotary_factor": 0.75,
        },
    }  # fmt: skip
    # transformers takes the short factors for a step that ends within the original length, and then the long ones
    # for keys beside cached short ones; here a model keeps to one kind.
