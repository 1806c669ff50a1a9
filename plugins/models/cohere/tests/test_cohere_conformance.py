"""Command models against transformers."""

from lmkit_testing import ModelConformance, heads


class TestCohere(ModelConformance):
    plugin = "model:CohereForCausalLM"
    values = {"tie_word_embeddings": True}
    variants = {"norms": {"use_qk_norm": True, "logit_scale": 0.5}}
    published = heads(24, 2, 128)


class TestCohere2(ModelConformance):
    plugin = "model:Cohere2ForCausalLM"
    values = {"head_dim": 12, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
    published = heads(8, 2, 128)


class TestCohere2Moe(ModelConformance):
    plugin = "model:Cohere2MoeForCausalLM"
    values = {
        "head_dim": 12,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_experts": 4,
        "prefix_dense_intermediate_size": 56,
    }
    variants = {
        "dense first": {"mlp_layer_types": ["dense", "sparse"], "num_shared_experts": 2, "rms_norm_eps": 1e-5},
        "dense last": {"mlp_layer_types": ["sparse", "dense"], "expert_selection_fn": "sigmoid"},
        "sum": {
            "num_shared_experts": 1,
            "shared_expert_combination_strategy": "sum",
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
        },
    }
    published = heads(8, 2, 128)
