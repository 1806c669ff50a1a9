"""GPTQ: the kit, files of GPTQModel, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lmkit.api import CannotSplit, CheckpointError, LinearSpec, UnsupportedModel
from lmkit.config import EngineConfig, ModelConfig
from lmkit.plugins.resolve import resolve
from lmkit_quantization_gptq.scheme import GptqScheme
from lmkit_testing import QuantizationConformance
from lmkit_testing.produced import INTEGER, REFERENCE, check, folders, in_own_file

SCHEME = "lmkit_quantization_gptq.scheme:GptqScheme"
PLAIN: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
LAYERS = (
    LinearSpec("layers.0.plain", 256, (384,), sources=("m.plain",)),
    LinearSpec("layers.0.qkv", 256, (256, 128, 128), True, "column", ("q", "k", "v"), ("m.q", "m.k", "m.v")),
)


class TestGptq(QuantizationConformance):
    plugin = "quantization:gptq"
    configs = {
        "int4": PLAIN,
        "two": PLAIN | {"bits": 2, "group_size": 32, "checkpoint_format": "gptq_v2"},
        "three": PLAIN | {"bits": 3, "group_size": 128},
        "rows": PLAIN | {"bits": 8, "group_size": -1},
        "ordered": PLAIN | {"desc_act": True},
    }
    kernels = ("linear_integer_native", "linear_reference")
    layers = LAYERS
    tolerance = {"float32": 2e-2, "bfloat16": 3e-2}  # activations of 8 bits

    def stored(self, fmt, layer, seed=0):
        tensors = super().stored(fmt, layer, seed)
        if fmt.ordered:
            groups = torch.arange(layer.in_features, dtype=torch.int32) // fmt.group
            mixed = torch.randperm(layer.in_features, generator=torch.Generator().manual_seed(seed))
            tensors["g_idx"] = groups[mixed]
        return tensors


@pytest.mark.parametrize("folder", folders(__file__), ids=lambda folder: folder.name)
@pytest.mark.parametrize(("kernel", "tolerance"), [(REFERENCE, 2e-3), (INTEGER, 8e-2)])
def test_producers_checkpoint(folder: Path, kernel: str, tolerance: float) -> None:
    """Exact up to the float16 in which the producer multiplies; integer kernels round activations to 8 bits, too."""
    check(folder, SCHEME, kernel, tolerance)


def test_dynamic_of_the_producer() -> None:
    """The first pattern that fits holds: a module left as it is, another of 8 bits, the rest as all."""
    (folder,) = folders(__file__, "gptq_dynamic")
    scheme = GptqScheme.parse(json.loads((folder / "config.json").read_text())["quantization_config"])
    names = {name: f"model.layers.0.{name}" for name in ("self_attn.o_proj", "mlp.down_proj", "mlp.up_proj")}
    found = {key: scheme.for_layer(LinearSpec(key, 64, (64,), sources=(name,))) for key, name in names.items()}
    assert found["self_attn.o_proj"] is None
    assert [found[key] and (found[key].name, found[key].stored_bits) for key in list(names)[1:]] == [
        ("int8", 8), ("int4", 4),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"bits": 5}, "bits"),
        ({"bits": "4"}, "bits"),
        ({"group_size": 0}, "group_size"),
        ({"group_size": 12}, "group_size"),
        ({"group_size": True}, "group_size"),
        ({"desc_act": 1}, "desc_act"),
        ({"lm_head": True}, "lm_head"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format"),
        ({"format": "gptq_p"}, "format"),
        ({"pack_dtype": "int64"}, "pack_dtype"),
        ({"dynamic": ["x"]}, "dynamic"),
        ({"dynamic": {"(": {}}}, "dynamic"),
        ({"dynamic": {"x": {"bits": 6}}}, "dynamic.x.bits"),
        ({"dynamic": {"x": {"shape": 6}}}, "dynamic.x.shape"),
        ({"modules_in_block_to_quantize": "mlp"}, "modules_in_block_to_quantize"),
    ],
)
def test_values_not_understood_are_refused(change: dict[str, object], key: str) -> None:
    with pytest.raises(UnsupportedModel) as failure:
        GptqScheme.parse(PLAIN | change)
    assert failure.value.key == f"quantization_config.{key}"


def test_a_pattern_that_takes_for_ever_is_refused() -> None:
    scheme = GptqScheme.parse(PLAIN | {"dynamic": {r"(a|aa)+$": {}}})
    with pytest.raises(UnsupportedModel, match="quick to match"):
        scheme.for_layer(LinearSpec("x", 64, (64,), sources=("a" * 60 + ".b",)))


def test_merged_layers_are_stored_alike() -> None:
    scheme = GptqScheme.parse(PLAIN | {"dynamic": {"-:m.k": {}}})
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.qkv"):
        scheme.for_layer(LAYERS[1])


def test_modules_of_a_block() -> None:
    scheme = GptqScheme.parse(PLAIN | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]})
    for name, quantized in (("self_attn.q_proj", True), ("mlp.down_proj", False)):
        layer = LinearSpec(name, 64, (64,), sources=(f"model.layers.3.{name}",))
        assert (scheme.for_layer(layer) is not None) == quantized


def test_sizes_that_do_not_divide_are_named() -> None:
    for what, layer in (
        ("columns", LinearSpec("layers.1.up", 80, (64,))),
        ("rows", LinearSpec("layers.1.up", 64, (72,))),
    ):
        fmt = GptqScheme.parse(PLAIN).for_layer(layer)
        assert fmt is not None
        with pytest.raises(UnsupportedModel, match=rf"{what} of layers\.1\.up"):
            fmt.params(layer, "float32")


def test_groups_do_not_straddle_ranks() -> None:
    whole, part = LinearSpec("o", 192, (64,)), LinearSpec("o", 96, (64,))
    for change in ({}, {"desc_act": True}):
        fmt = GptqScheme.parse(PLAIN | change).for_layer(whole)
        assert fmt is not None
        with pytest.raises(CannotSplit, match="two ranks"):
            fmt.params(part, "float32")


@pytest.mark.parametrize("values", [[0] * 64, [1, 0] * 32, [7] * 64])
def test_an_order_that_is_none_is_refused(values: list[int]) -> None:
    """Groups of unequal size, groups that are not there, and an order where the configuration promises none."""
    layer = LinearSpec("x", 64, (32,))
    noise = TestGptq()
    fmt = GptqScheme.parse(PLAIN | {"group_size": 32, "desc_act": values[:2] != [1, 0]}).for_layer(layer)
    assert fmt is not None
    params = noise.stored(fmt, layer) | {"g_idx": torch.tensor(values, dtype=torch.int32)}
    with pytest.raises(CheckpointError, match="g_idx"):
        fmt.integers(params)


@pytest.mark.parametrize("name", ["gptq4_act_order", "gptq_dynamic"])
def test_the_resolver_takes_it_as_it_is(name: str) -> None:
    """Nobody names the format: the checkpoint does, and integer kernels come first for it."""
    pytest.importorskip("lmkit_platform_cpu")
    (folder,) = folders(__file__, name)
    resolved, _, _ = resolve(EngineConfig(model=ModelConfig(model=str(folder))))
    chosen = resolved.choice("quantization")
    assert chosen is not None
    assert (chosen.name, "quant_method=gptq" in chosen.why) == ("gptq", True)
    for component in ("linear:int4", "linear:int8"):
        first = resolved.choice("op", component)
        assert first is not None
        assert first.name in ("linear_integer_native", "linear_reference")


def test_a_file_beside_the_configuration_is_enough(tmp_path: Path) -> None:
    """As older ones wrote it: nothing in config.json, and the method nowhere."""
    (folder,) = folders(__file__, "gptq4")
    own = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True, "model_file_base_name": "model"}
    resolved, checkpoint, _ = resolve(
        EngineConfig(model=ModelConfig(model=str(in_own_file(folder, tmp_path, "quantize_config.json", own))))
    )
    chosen = resolved.choice("quantization")
    assert chosen is not None
    assert chosen.name == "gptq"
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert GptqScheme.parse(checkpoint.config["quantization_config"]) == GptqScheme.parse(said)
