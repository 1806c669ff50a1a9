"""LongCat Flash against transformers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from lmkit.api import UnsupportedModel
from lmkit_model_deepseek.longcat import Longcat, in_file
from lmkit_testing import ModelConformance
from lmkit_testing.checkpoints import rename
from lmkit_worker.loaded import LoadedModel

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32,
    "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
EXPERT = re.compile(r"\.experts\.(\d+)\.")


def of_experts(tensors: dict[str, Any]) -> dict[str, Any]:
    """Released files have no weights of experts that need none; the library writes some."""
    numbers = {name: int(found[1]) for name in tensors if (found := EXPERT.search(name))}
    return {name: tensor for name, tensor in tensors.items() if numbers.get(name, 0) < 6}


class TestLongcatFlash(ModelConformance):
    plugin = "model:LongcatFlashForCausalLM"
    values = {
        "num_layers": 2, "num_hidden_layers": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8, "head_dim": 8, "v_head_dim": 10, "num_key_value_heads": 4, "n_routed_experts": 6,
        "zero_expert_num": 4, "moe_topk": 3, "expert_ffn_hidden_size": 32, "ffn_hidden_size": 80,
        "routed_scaling_factor": 2.5,
    }  # fmt: skip
    variants = {
        "yarn": {"rope_parameters": YARN},
        "no idle experts": {"zero_expert_num": 0, "attention_bias": True},
    }
    published = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "head_dim": 64, "v_head_dim": 128}

    @classmethod
    def name_architecture(cls, directory: Path) -> None:
        given = json.loads((directory / "config.json").read_text())
        assert given["num_layers"] == 2
        rename(directory, {}, {"architectures": [cls.name()], "num_hidden_layers": None}, of_experts)

    def test_number_of_parameters_is_exact(self, loaded: LoadedModel) -> None:  # type: ignore[override]
        """The library counts weights of experts that have none."""
        assert loaded.weight_bytes == 4 * loaded.info.num_parameters

    def test_sources_are_in_the_file(self, directory: Path, loaded: LoadedModel) -> None:
        """Schemes name linears as the file does."""
        from safetensors import safe_open

        with safe_open(directory / "model.safetensors", "pt") as file:
            modules = {name.rpartition(".")[0] for name in file.keys()}  # noqa: SIM118
        assert {source for spec in loaded.info.linears for source in spec.sources} <= modules


def test_layers_of_the_file() -> None:
    assert in_file("model.layers.5.self_attn.o_proj") == "model.layers.2.self_attn.1.o_proj"
    assert in_file("model.layers.4.mlps.up_proj.{p}") == "model.layers.2.mlps.0.up_proj.{p}"
    assert in_file("model.layers.5.mlp.experts.0.up_proj") == "model.layers.5.mlp.experts.0.up_proj"


@pytest.mark.parametrize("given", [{"router_bias": True}, {"norm_topk_prob": True}, {"zero_expert_type": "drop"}])
def test_other_routers_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel) as failure:
        Longcat().describe({"architectures": ["LongcatFlashForCausalLM"], **given})
    assert [failure.value.key] == list(given)


def test_released_configuration() -> None:
    """LongCat Flash Chat."""
    config = {
        "architectures": ["LongcatFlashForCausalLM"], "vocab_size": 131072, "hidden_size": 6144, "num_layers": 28,
        "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048, "num_attention_heads": 64, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "n_routed_experts": 512, "zero_expert_num": 256, "moe_topk": 12,
    }  # fmt: skip
    info = Longcat().describe(config)
    assert round(info.num_parameters / 1e9) == 561
    assert len(info.layers) == 56
