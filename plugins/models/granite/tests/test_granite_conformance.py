"""Granite against transformers."""

from lmkit_testing import ModelConformance, heads

SCALES = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}


class TestGranite(ModelConformance):
    plugin = "model:GraniteForCausalLM"
    values = SCALES
    variants = {"biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}}
    published = heads(8, 2, 64)


class TestHyperClovaX(ModelConformance):
    plugin = "model:HyperCLOVAXForCausalLM"
    values = SCALES
    variants = {"pre": {"use_post_norm": False}}
    published = heads(8, 2, 128)


class TestGraniteSwa(ModelConformance):
    plugin = "model:GraniteSWAForCausalLM"
    values = SCALES | {"sliding_window": 9}
    variants = {"bases": {"layer_rope_theta": [0, 5000.0], "layer_types": ["full_attention", "sliding_attention"]}}
    published = heads(8, 2, 64)


MIX = SCALES | {"num_local_experts": 4, "num_experts_per_tok": 2}


class TestGraniteMoe(ModelConformance):
    plugin = "model:GraniteMoeForCausalLM"
    values = MIX
    published = heads(6, 2, 64)


class TestGraniteMoeShared(ModelConformance):
    plugin = "model:GraniteMoeSharedForCausalLM"
    values = MIX | {"shared_intermediate_size": 40}
    published = heads(6, 2, 64)


class TestGraniteMoeSwa(ModelConformance):
    plugin = "model:GraniteMoeSWAForCausalLM"
    values = MIX | {"sliding_window": 9, "shared_intermediate_size": 40}
    published = heads(6, 2, 64)


class TestGraniteMoeHybrid(ModelConformance):
    plugin = "model:GraniteMoeHybridForCausalLM"
    values = MIX | {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 16,
        "shared_intermediate_size": 40,
    }  # fmt: skip
    variants = {
        "dense": {"num_local_experts": 0, "position_embedding_type": "rope", "tie_word_embeddings": True},
        "biases": {"mamba_proj_bias": True, "mamba_conv_bias": False, "time_step_limit": [0.01, 0.5]},
    }
    published = heads(6, 2, 128)
