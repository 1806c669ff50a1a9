"""What files mean that leave keys out. Torch-free."""

from __future__ import annotations

HEADS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": 1536}
GROWING = {  # rotary parameters of Mistral 4
    "rope_type": "yarn",
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
DEFAULTS = {
    "DeepseekV32ForCausalLM": HEADS
    | {"n_shared_experts": 1, "n_routed_experts": 256, "moe_intermediate_size": 2048, "num_experts_per_tok": 8}
    | {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
    "GlmMoeDsaForCausalLM": HEADS
    | {"n_shared_experts": 1, "n_routed_experts": 256, "moe_intermediate_size": 2048, "num_experts_per_tok": 8}
    | {"routed_scaling_factor": 2.5, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256},
    "DeepseekV2ForCausalLM": HEADS | {"n_shared_experts": 2, "n_routed_experts": 64},
    "DeepseekV3ForCausalLM": HEADS
    | {"n_shared_experts": 1, "n_routed_experts": 256, "moe_intermediate_size": 2048, "num_experts_per_tok": 8},
    "Glm4MoeLiteForCausalLM": HEADS
    | {"n_shared_experts": 1, "n_routed_experts": 64, "moe_intermediate_size": 1536, "num_experts_per_tok": 4}
    | {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256},
    "YoutuForCausalLM": HEADS,
    "MiniCPM3ForCausalLM": {
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
    },
    "Mistral4ForCausalLM": HEADS
    | {"n_shared_experts": 1, "n_routed_experts": 128, "moe_intermediate_size": 2048, "num_experts_per_tok": 4}
    | {"q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64},
}
