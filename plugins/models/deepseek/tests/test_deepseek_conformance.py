"""DeepSeek and its like against transformers."""

from pathlib import Path

from lmkit_testing import ModelConformance
from lmkit_testing.checkpoints import half_open, rename, without_gates

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

    def test_the_cache_holds_latents(self, loaded):
        """16 numbers of a latent and 8 that are turned, not 4 heads with keys of 20 and values of 10."""
        (spec,) = loaded.info.kv_specs(32, "bfloat16")
        assert spec.bytes_per_block == len(loaded.info.layers) * 32 * (16 + 8) * 2


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


class TestDeepseek(ModelConformance):
    """What transformers runs as Qwen2-MoE, whose shared expert has a gate: one that is always half open."""

    plugin = "model:DeepseekForCausalLM"
    family = "Qwen2MoeForCausalLM"
    values = {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "qkv_bias": False,
        "shared_expert_intermediate_size": 48, "norm_topk_prob": False, "mlp_only_layers": [0],
    }  # fmt: skip
    variants = {"sum of one": {"norm_topk_prob": True}}
    published = {"hidden_size": 128, "num_attention_heads": 1, "num_key_value_heads": 1}
    skip = {"test_number_of_parameters_is_exact": "the other one has gates"}

    @classmethod
    def name_architecture(cls, directory: Path) -> None:
        half_open(directory)
        config = {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1}
        names = {"shared_expert.": "shared_experts."}
        rename(directory, names, {**config, "architectures": [cls.name()]}, without_gates)


class TestDeepseekV32(ModelConformance):
    """As far as `index_topk`."""

    plugin = "model:DeepseekV32ForCausalLM"
    values = MIX | {"index_topk": 160, "index_head_dim": 16, "index_n_heads": 2}
    variants = {"yarn": {"rope_parameters": YARN}}
    published = PUBLISHED | {"index_head_dim": 128}
    skip = {
        "test_number_of_parameters_is_exact": "indexers are not loaded",
        "test_loading_is_strict": "indexers may be missing",
    }

    def test_length(self, loaded):
        assert loaded.info.max_length == 160


class TestGlmMoeDsa(TestDeepseekV32):
    plugin = "model:GlmMoeDsaForCausalLM"
    variants = {}
    published = {"qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "index_head_dim": 128}
