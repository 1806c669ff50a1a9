"""AWQ: the kit, files of GPTQModel's quantizer, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lmkit.api import LinearSpec, UnsupportedModel
from lmkit.config import EngineConfig, ModelConfig
from lmkit.plugins.resolve import resolve
from lmkit_quantization_awq.scheme import AwqScheme
from lmkit_testing import QuantizationConformance
from lmkit_testing.produced import INTEGER, REFERENCE, check, folders, in_own_file

SCHEME = "lmkit_quantization_awq.scheme:AwqScheme"
PLAIN: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
LAYERS = (
    LinearSpec("layers.0.plain", 256, (384,), sources=("m.plain",)),
    LinearSpec("layers.0.qkv", 256, (256, 128, 128), True, "column", ("q", "k", "v"), ("m.q", "m.k", "m.v")),
    LinearSpec("layers.0.gate_up", 128, (72, 40), False, "column", ("gate", "up"), ("m.gate", "m.up")),
)


class TestAwq(QuantizationConformance):
    plugin = "quantization:awq"
    configs = {"groups": PLAIN, "rows": PLAIN | {"group_size": -1}, "old names": {"w_bit": 4, "q_group_size": 32}}
    kernels = ("linear_integer_native", "linear_reference")
    layers = LAYERS
    tolerance = {"float32": 2e-2, "bfloat16": 3e-2}  # activations of 8 bits


@pytest.mark.parametrize("folder", folders(__file__), ids=lambda folder: folder.name)
@pytest.mark.parametrize(("kernel", "tolerance"), [(REFERENCE, 2e-3), (INTEGER, 8e-2)])
def test_producers_checkpoint(folder: Path, kernel: str, tolerance: float) -> None:
    """Exact up to the float16 in which the producer multiplies; integer kernels round activations to 8 bits, too."""
    check(folder, SCHEME, kernel, tolerance)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"bits": 8}, "bits"),
        ({"group_size": 20}, "group_size"),
        ({"version": "gemv"}, "version"),
        ({"version": 1}, "version"),
        ({"zero_point": "yes"}, "zero_point"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
    ],
)
def test_values_not_understood_are_refused(change: dict[str, object], key: str) -> None:
    with pytest.raises(UnsupportedModel) as failure:
        AwqScheme.parse(PLAIN | change)
    assert failure.value.key == f"quantization_config.{key}"


@pytest.mark.parametrize(
    ("entry", "kept"), [("mlp", True), ("gate", True), ("experts", False), ("model.layers.0", True)]
)
def test_modules_left_as_they_are(entry: str, kept: bool) -> None:
    layer = LinearSpec("gate", 64, (64,), sources=("model.layers.0.mlp.gate",))
    assert (AwqScheme.parse(PLAIN | {"modules_to_not_convert": [entry]}).for_layer(layer) is None) == kept


def test_merged_layers_are_stored_alike() -> None:
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.qkv"):
        AwqScheme.parse(PLAIN | {"modules_to_not_convert": ["m.v"]}).for_layer(LAYERS[1])


def test_the_producers_own_file_is_enough(tmp_path: Path) -> None:
    """As older ones wrote it: nothing in config.json, and the method nowhere."""
    (folder,) = folders(__file__, "awq")
    own = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    resolved, checkpoint, _ = resolve(
        EngineConfig(model=ModelConfig(model=str(in_own_file(folder, tmp_path, "quant_config.json", own))))
    )
    chosen = resolved.choice("quantization")
    assert chosen is not None
    assert chosen.name == "awq"
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert AwqScheme.parse(checkpoint.config["quantization_config"]) == AwqScheme.parse(said)
