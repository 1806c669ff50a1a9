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
