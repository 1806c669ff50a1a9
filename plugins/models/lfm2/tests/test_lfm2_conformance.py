"""LFM2 against transformers."""

from __future__ import annotations

import pytest
from lmkit.api import UnsupportedModel
from lmkit_decoders import ConfigReader
from lmkit_model_lfm2.arch import lfm2
from lmkit_testing import ModelConformance, heads


class TestLfm2(ModelConformance):
    plugin = "model:Lfm2ForCausalLM"
    values = {
        "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "tie_word_embeddings": True,
        "block_multiple_of": 8,
    }  # fmt: skip
    variants = {"biases": {"conv_bias": True, "block_auto_adjust_ff_dim": False, "conv_L_cache": 4}}
    published = heads(8, 2, 64)


class TestLfm2Moe(ModelConformance):
    plugin = "model:Lfm2MoeForCausalLM"
    values = {
        "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "tie_word_embeddings": True,
        "num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    }  # fmt: skip
    variants = {"weights": {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5}}
    published = heads(8, 2, 64)


GIVEN = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}


@pytest.mark.parametrize(("layers", "convs"), [(None, 0), ([], 3), ([1], 2), ([0, 2], 1)])
def test_layers_with_attention(layers: list[int] | None, convs: int) -> None:
    mixer = lfm2(ConfigReader({**GIVEN, "full_attn_idxs": layers})).mixer
    assert mixer is not None
    assert sum(mixer.layers) == convs


@pytest.mark.parametrize("layers", [2, [3], [-1], ["1"], [True]])
def test_layers_that_there_are_not(layers: object) -> None:
    with pytest.raises(UnsupportedModel, match="full_attn_idxs"):
        lfm2(ConfigReader({**GIVEN, "full_attn_idxs": layers}))
