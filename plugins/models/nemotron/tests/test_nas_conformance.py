"""Nemotron NAS against a Llama of transformers whose layers are alike and do in part nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lmkit.api import UnsupportedModel
from lmkit_decoders import ConfigReader
from lmkit_model_nemotron.nas import nemotron_nas
from lmkit_testing import ModelConformance
from lmkit_testing.checkpoints import rename, tiny_checkpoint
from lmkit_testing.model import deviation, load_tiny, prompt
from lmkit_testing.steps import ModelDriver
from lmkit_worker.loaded import LoadedModel
from safetensors.torch import load_file, save_file

TARGET = "lmkit_model_nemotron.nas:NemotronNas"
SIZE = 512
LAYERS = ((2, 10.0), (1, 3.0), (0, 10.0), (4, 0.0), (0, 0.0))  # heads of keys and values, multiple; 0: nothing
SIZES = {10.0: 512, 3.0: 256, 0.0: 0}


def parts(tensors: dict[str, Any], layer: int, *names: str) -> list[str]:
    """The tensors in these modules of a layer."""
    return [key for key in tensors if any(f"layers.{layer}.{name}." in key for name in names)]


def with_idle_parts(directory: Path, heads: int) -> None:
    """Heads that share are alike; what is not there adds zeros."""
    tensors = load_file(directory / "model.safetensors")
    for layer, (num, multiple) in enumerate(LAYERS):
        for key in parts(tensors, layer, "self_attn.k_proj", "self_attn.v_proj") if num else ():
            groups = tensors[key].unflatten(0, (num, heads // num, -1))
            tensors[key] = groups[:, :1].expand_as(groups).flatten(0, 2).contiguous()
        for key in parts(
            tensors, layer, *([] if num else ["self_attn.o_proj"]), *([] if multiple else ["mlp.down_proj"])
        ):
            tensors[key].zero_()
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"][:, SIZES[multiple] :] = 0
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def without_idle_parts(tensors: dict[str, Any], heads: int) -> dict[str, Any]:
    tensors = dict(tensors)
    for layer, (num, multiple) in enumerate(LAYERS):
        size = SIZES[multiple]
        for key in parts(tensors, layer, "self_attn.k_proj", "self_attn.v_proj") if num else ():
            tensors[key] = tensors[key].unflatten(0, (num, heads // num, -1))[:, 0].flatten(0, 1)
        for key in parts(tensors, layer, "mlp.gate_proj", "mlp.up_proj"):
            tensors[key] = tensors[key][:size]
        down = f"model.layers.{layer}.mlp.down_proj.weight"
        tensors[down] = tensors[down][:, :size].contiguous()
        gone = [] if num else ["self_attn", "input_layernorm"]
        for key in parts(tensors, layer, *gone, *([] if multiple else ["mlp", "post_attention_layernorm"])):
            del tensors[key]
    return tensors


class TestNemotronNas(ModelConformance):
    plugin = "model:DeciLMForCausalLM"
    family = "LlamaForCausalLM"
    values = {"num_hidden_layers": len(LAYERS), "num_key_value_heads": 4, "intermediate_size": SIZE}
    variants = {"biases": {"attention_bias": True, "mlp_bias": True}}
    published = {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128}

    @classmethod
    def name_architecture(cls, directory: Path) -> None:
        heads = json.loads((directory / "config.json").read_text())["num_attention_heads"]
        with_idle_parts(directory, heads)
        blocks = [
            {
                "attention": {"n_heads_in_group": heads // num} if num else {"no_op": True, "n_heads_in_group": None},
                "ffn": {"ffn_mult": multiple, "no_op": False} if multiple else {"no_op": True},
            }
            for num, multiple in LAYERS
        ]
        config = {"architectures": [cls.name()], "block_configs": blocks, "num_key_value_heads": None}
        config["intermediate_size"] = None
        rename(directory, {}, config, lambda tensors: without_idle_parts(tensors, heads))

    def test_number_of_parameters_is_exact(self, loaded: LoadedModel) -> None:  # type: ignore[override]
        """The other one has the idle parts too."""
        assert loaded.weight_bytes == 4 * loaded.info.num_parameters


@pytest.fixture
def linears(tmp_path: Path) -> Path:
    """Three layers: a linear for each block; for attention alone; for the MLP alone."""
    tiny_checkpoint("llama", tmp_path, num_hidden_layers=3)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if "proj" not in name}
    gone = ["model.layers.1.post_attention_layernorm.weight", "model.layers.2.input_layernorm.weight"]
    kept = {name: t for name, t in kept.items() if name not in gone}
    noise = torch.Generator().manual_seed(0)
    for name in ("0.self_attn.linear_attn", "1.self_attn.linear_attn", "0.mlp.linear_mlp", "2.mlp.linear_mlp"):
        kept[f"model.layers.{name}.weight"] = torch.randn(48, 48, generator=noise) / 7
    save_file(kept, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    linear, nothing = {"replace_with_linear": True}, {"no_op": True}
    kinds = ((linear, linear), (linear, nothing), (nothing, linear))
    config |= {"architectures": ["DeciLMForCausalLM"]}
    config["block_configs"] = [{"attention": attention, "ffn": ffn} for attention, ffn in kinds]
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_linears_in_place_of_blocks(linears: Path) -> None:
    loaded = load_tiny(linears, TARGET, "float32")
    assert loaded.weight_bytes == 4 * loaded.info.num_parameters
    ids = prompt(loaded.info.vocab_size)
    weights = {name.removeprefix("model."): t for name, t in load_file(linears / "model.safetensors").items()}
    h = weights["embed_tokens.weight"][ids]
    order = ((0, "input", "self_attn.linear_attn"), (0, "post_attention", "mlp.linear_mlp"))
    for layer, norm, linear in (*order, (1, "input", "self_attn.linear_attn"), (2, "post_attention", "mlp.linear_mlp")):
        at = f"layers.{layer}"
        normed = torch.nn.functional.rms_norm(h, (48,), weights[f"{at}.{norm}_layernorm.weight"], 1e-6)
        h = h + normed @ weights[f"{at}.{linear}.weight"].T
    expected = torch.nn.functional.rms_norm(h, (48,), weights["norm.weight"], 1e-6) @ weights["lm_head.weight"].T
    got = ModelDriver(loaded, "float32").run(0, ids, 7)
    assert deviation(got, expected) < 1e-4


SMALL = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_heads_of_older_files() -> None:
    cfg = nemotron_nas(ConfigReader({**SMALL, "intermediate_size": 80, "num_key_value_heads_per_layer": [4, 1]}))
    assert [cfg.need(i).num_kv_heads for i in range(2)] == [4, 1]
    assert [cfg.at(i).intermediate_size for i in range(2)] == [80, 80]


@pytest.mark.parametrize(
    ("attention", "ffn", "key"),
    [
        ({"n_heads_in_group": 3}, {"ffn_mult": 1.0}, "n_heads_in_group"),
        ({"n_heads_in_group": 2, "window_length": 9}, {"ffn_mult": 1.0}, "window_length"),
        ({"n_heads_in_group": 2, "num_sink_tokens": 4}, {"ffn_mult": 1.0}, "num_sink_tokens"),
        ({"n_heads_in_group": 2}, {"ffn_mult": 1.0, "sparsify": ["x"]}, "sparsify"),
        ({"n_heads_in_group": 2}, {}, "intermediate_size"),
        ([], {"ffn_mult": 1.0}, "attention"),
    ],
)
def test_blocks_that_there_are_not(attention: Any, ffn: Any, key: str) -> None:
    with pytest.raises(UnsupportedModel) as failure:
        nemotron_nas(ConfigReader({**SMALL, "block_configs": [{"attention": attention, "ffn": ffn}] * 2}))
    assert failure.value.key == key


@pytest.mark.parametrize("given", [None, [], [{}], 7])
def test_there_is_a_block_for_each_layer(given: object) -> None:
    with pytest.raises(UnsupportedModel) as failure:
        nemotron_nas(ConfigReader({**SMALL, "block_configs": given}))
    assert failure.value.key == "block_configs"
