"""Hunyuan against transformers."""

from lmkit_testing import ModelConformance, heads

ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}


class TestHunyuanDense(ModelConformance):
    plugin = "model:HunYuanDenseV1ForCausalLM"
    values = {"head_dim": 16}
    variants = {"stretched": {"rope_parameters": ALPHA, "attention_bias": True, "tie_word_embeddings": True}}
    published = heads(
        8, 2, 128, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}
    )


class TestHunyuanMoe(ModelConformance):
    plugin = "model:HunYuanMoEV1ForCausalLM"
    values = {"head_dim": 16, "num_experts": 4, "moe_topk": 2}
    published = heads(
        8, 2, 128, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}
    )


class TestHYV3(ModelConformance):
    plugin = "model:HYV3ForCausalLM"
    values = {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_layer_types": ["dense", "sparse"],
    }
    variants = {"biases, two shared": {"attention_bias": True, "mlp_bias": True, "num_shared_experts": 2}}
    published = heads(16, 2, 128)
