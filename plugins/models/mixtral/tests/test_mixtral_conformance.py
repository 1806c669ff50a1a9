"""Mixtral and Phi-MoE against transformers."""

from pathlib import Path

import pytest
from lmkit.api import ModelSpec
from lmkit_testing import ModelConformance, heads
from lmkit_worker.loaded import LoadedModel


class TestMixtral(ModelConformance):
    plugin = "model:MixtralForCausalLM"
    values = {"num_local_experts": 4, "head_dim": 12}
    variants = {"window": {"sliding_window": 9}}
    published = heads(8, 2, 128)

    @pytest.mark.one_in(3)
    def test_halves_of_experts_on_four_ranks(self, directory: Path, loaded: LoadedModel, spec: ModelSpec) -> None:
        """Two ranks have the same two experts, half of each."""
        for rank in self._check_ranks(directory, loaded, spec, size=4, deals=2):
            up = rank.model.layers[0].mlp.experts.up
            assert (up.local.experts, 2 * up.local.out_features[0]) == (2, up.spec.out_features[0])


class TestPhiMoE(ModelConformance):
    plugin = "model:PhimoeForCausalLM"
    values = {"num_local_experts": 4, "router_jitter_noise": 0.3}
    variants = {"biases": {"attention_bias": True, "lm_head_bias": True}}
    published = heads(8, 2, 128)


class TestPhiMoEAsReleased(ModelConformance):
    plugin = "model:PhiMoEForCausalLM"
    family = "PhimoeForCausalLM"
    values = {"num_local_experts": 4}
    published = heads(8, 2, 128)
