"""Mamba, Mamba 2, Falcon Mamba, Bamba and Jamba against transformers."""

from __future__ import annotations

import pytest
from lmkit.api import UnsupportedModel
from lmkit_decoders import ConfigReader
from lmkit_model_mamba.arch import bamba
from lmkit_testing import ModelConformance, heads


class TestMamba(ModelConformance):
    plugin = "model:MambaForCausalLM"
    values = {"state_size": 8, "tie_word_embeddings": True}
    variants = {"biases": {"use_bias": True, "use_conv_bias": False, "time_step_rank": 5, "tie_word_embeddings": False}}
    published = {"state_size": 16}


class TestFalconMamba(ModelConformance):
    plugin = "model:FalconMambaForCausalLM"
    values = {"state_size": 8}
    published = {"state_size": 16}


class TestMamba2(ModelConformance):
    plugin = "model:Mamba2ForCausalLM"
    values = {"num_heads": 8, "head_dim": 12, "n_groups": 2, "state_size": 8, "chunk_size": 16}
    variants = {"biases": {"use_bias": True, "use_conv_bias": False, "n_groups": 1}}
    published = {"hidden_size": 64, "num_heads": 2, "head_dim": 64, "n_groups": 1, "state_size": 128}


class TestBamba(ModelConformance):
    plugin = "model:BambaForCausalLM"
    values = {
        "num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    }  # fmt: skip
    variants = {"biases": {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False}}
    published = heads(8, 2, 128)


@pytest.mark.parametrize("layers", [3, [3], ["1"]])
def test_layers_that_there_are_not(layers: object) -> None:
    with pytest.raises(UnsupportedModel, match="attn_layer_indices"):
        bamba(ConfigReader({"num_hidden_layers": 3, "attn_layer_indices": layers}))


class TestJamba(ModelConformance):
    plugin = "model:JambaForCausalLM"
    values = {
        "num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4,
        "num_experts_per_tok": 2, "mamba_d_state": 8,
    }  # fmt: skip
    variants = {"dense": {"num_experts": 1, "mamba_proj_bias": True, "mamba_dt_rank": 5}}
    published = heads(8, 2, 128)
