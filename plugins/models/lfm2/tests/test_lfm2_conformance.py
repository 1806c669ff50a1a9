"""LFM2 against transformers."""

from __future__ import annotations

from lmkit.testing import ModelConformance


class TestLfm2(ModelConformance):
    plugin = "model:Lfm2ForCausalLM"
    values = {
        "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "tie_word_embeddings": True,
        "block_multiple_of": 8,
    }  # fmt: skip
    variants = {"biases": {"conv_bias": True, "block_auto_adjust_ff_dim": False, "conv_L_cache": 4}}


class TestLfm2Moe(ModelConformance):
    plugin = "model:Lfm2MoeForCausalLM"
    values = {
        "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "tie_word_embeddings": True,
        "num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    }  # fmt: skip
    variants = {"weights": {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5}}
