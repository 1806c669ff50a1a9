"""What files of some families mean that leave keys out. Torch-free."""

from __future__ import annotations

STRETCHED = {  # rotary parameters of CWM
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GROWING = {  # those of Ministral 3
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
DEFAULTS = {
    **{name: {"num_key_value_heads": 8} for name in ("MistralForCausalLM", "MinistralForCausalLM")},
    "Ministral3ForCausalLM": {"num_key_value_heads": 8, "head_dim": 128},
    "SeedOssForCausalLM": {"num_key_value_heads": 8, "head_dim": 128},
    "HeliumForCausalLM": {"num_key_value_heads": 20},
}
