"""ERNIE 4.5 against transformers."""

from lmkit_testing import ModelConformance, heads


class TestErnie(ModelConformance):
    plugin = "model:Ernie4_5ForCausalLM"
    values = {"head_dim": 16, "tie_word_embeddings": True}
    variants = {"biases": {"use_bias": True, "tie_word_embeddings": False}}
    published = heads(16, 2, 128)


class TestErnieMoe(ModelConformance):
    plugin = "model:Ernie4_5_MoeForCausalLM"
    values = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1}
    variants = {
        "everywhere": {"moe_layer_start_index": 0, "moe_num_shared_experts": 0, "use_bias": True, "moe_norm_min": 0.9}
    }
    published = heads(10, 2, 128)
