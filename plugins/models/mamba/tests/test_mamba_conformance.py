"""Mamba, Mamba 2 and Falcon Mamba against transformers."""

from __future__ import annotations

from lmkit.testing import ModelConformance


class TestMamba(ModelConformance):
    plugin = "model:MambaForCausalLM"
    values = {"state_size": 8, "tie_word_embeddings": True}
    variants = {"biases": {"use_bias": True, "use_conv_bias": False, "time_step_rank": 5, "tie_word_embeddings": False}}


class TestFalconMamba(ModelConformance):
    plugin = "model:FalconMambaForCausalLM"
    values = {"state_size": 8}


class TestMamba2(ModelConformance):
    plugin = "model:Mamba2ForCausalLM"
    values = {"num_heads": 8, "head_dim": 12, "n_groups": 2, "state_size": 8, "chunk_size": 16}
    variants = {"biases": {"use_bias": True, "use_conv_bias": False, "n_groups": 1}}
