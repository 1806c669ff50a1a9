"""OLMo against transformers."""

from lmkit_testing import ModelConformance, heads

YARN = {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0, "original_max_position_embeddings": 64}


class TestOlmo(ModelConformance):
    plugin = "model:OlmoForCausalLM"
    variants = {"clip": {"clip_qkv": 2.0, "attention_bias": True}}
    published = heads(2, 2, 128)


class TestOlmo2(ModelConformance):
    plugin = "model:Olmo2ForCausalLM"
    published = heads(10, 2, 128)


class TestOlmo3(ModelConformance):
    plugin = "model:Olmo3ForCausalLM"
    values = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
    variants = {
        "yarn": {
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            }
        }
    }
    published = heads(10, 2, 128)


class TestOlmoe(ModelConformance):
    plugin = "model:OlmoeForCausalLM"
    values = {"num_experts": 4, "num_experts_per_tok": 2}
    variants = {"renormalized": {"norm_topk_prob": True, "clip_qkv": 2.0}}
    published = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}


class TestFlexOlmo(ModelConformance):
    plugin = "model:FlexOlmoForCausalLM"
    values = {"num_experts": 4, "num_experts_per_tok": 2}
    published = heads(2, 2, 128)


class TestOlmoHybrid(ModelConformance):
    """The library writes the convolutions of queries, keys and values as equal thirds, so here they are."""

    plugin = "model:OlmoHybridForCausalLM"
    values = {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    }  # fmt: skip
    variants = {
        "no positions": {"rope_parameters": {"rope_type": "default", "rope_theta": None}, "attention_bias": True},
        "positive": {"linear_allow_neg_eigval": False},
    }
    published = heads(2, 2, 128)
