"""DeepSeek and its like against transformers."""

from lmkit.testing import ModelConformance

LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "num_key_value_heads": 4,
}  # fmt: skip
MIX = LATENT | {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 2, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32,
    "mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip

RELEASED = YARN | {
    "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
PUBLISHED = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


class TestDeepseekV2(ModelConformance):
    plugin = "model:DeepseekV2ForCausalLM"
    values = MIX | {"topk_method": "group_limited_greedy"}
    variants = {"lite": {"q_lora_rank": None, "topk_method": "greedy", "routed_scaling_factor": 1.5}}
    published = PUBLISHED | {"rope_parameters": RELEASED | {"mscale": 0.707, "mscale_all_dim": 0.707}}


class TestDeepseekV3(ModelConformance):
    plugin = "model:DeepseekV3ForCausalLM"
    values = MIX
    published = PUBLISHED | {"rope_parameters": RELEASED}
    variants = {"yarn": {"rope_parameters": YARN, "rope_interleave": False}}


class TestGlm4MoeLite(ModelConformance):
    plugin = "model:Glm4MoeLiteForCausalLM"
    values = MIX
    published = {"qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}


class TestYoutu(ModelConformance):
    plugin = "model:YoutuForCausalLM"
    values = LATENT  # untied: transformers loads a tied one with random embeddings
    published = PUBLISHED


class TestMiniCpm3(ModelConformance):
    plugin = "model:MiniCPM3ForCausalLM"
    values = LATENT | {"tie_word_embeddings": True, "scale_emb": 3, "dim_model_base": 24}
    published = {
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "original_max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 16,
            "long_factor": [1 + i / 8 for i in range(16)],
        },
    }  # fmt: skip


class TestMistral4(ModelConformance):
    plugin = "model:Mistral4ForCausalLM"
    values = MIX | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 8}}
    published = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128}
