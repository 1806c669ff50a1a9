"""AutoRound: the kit, its own files, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lmkit.api import LinearSpec, UnsupportedModel
from lmkit_layouts import AwqWords, GptqWords
from lmkit_quantization_auto_round.scheme import AutoRoundScheme
from lmkit_testing import QuantizationConformance
from lmkit_testing.produced import INTEGER, REFERENCE, check, folders

SCHEME = "lmkit_quantization_auto_round.scheme:AutoRoundScheme"
PLAIN: dict[str, Any] = {
    "quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": True, "data_type": "int",
    "packing_format": "auto_round:auto_gptq", "autoround_version": "0.16.1",
}  # fmt: skip
LAYERS = (
    LinearSpec("layers.0.plain", 256, (384,), sources=("m.plain",)),
    LinearSpec("layers.0.qkv", 256, (256, 128, 128), True, "column", ("q", "k", "v"), ("m.q", "m.k", "m.v")),
)


class TestAutoRound(QuantizationConformance):
    plugin = "quantization:auto-round"
    configs = {
        "groups": PLAIN,
        "rows of 8 bits": PLAIN | {"bits": 8, "group_size": -1},
        "as awq": PLAIN | {"packing_format": "auto_round:auto_awq"},
    }
    kernels = ("linear_integer_native", "linear_reference")
    layers = LAYERS
    tolerance = {"float32": 2e-2, "bfloat16": 3e-2}  # activations of 8 bits


@pytest.mark.parametrize("folder", folders(__file__), ids=lambda folder: folder.name)
@pytest.mark.parametrize(("kernel", "tolerance"), [(REFERENCE, 2e-3), (INTEGER, 8e-2)])
def test_producers_checkpoint(folder: Path, kernel: str, tolerance: float) -> None:
    """Exact up to scales, which are stored in float16; integer kernels round activations to 8 bits, too."""
    check(folder, SCHEME, kernel, tolerance)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"bits": 5}, "bits"),
        ({"bits": 8, "packing_format": "auto_round:auto_awq"}, "bits"),
        ({"group_size": 20}, "group_size"),
        ({"data_type": "mx_fp"}, "data_type"),
        ({"packing_format": "auto_round:llm_compressor"}, "packing_format"),
        ({"act_bits": 8}, "act_bits"),
        ({"super_bits": 6}, "super_bits"),
        ({"block_name_to_quantize": 3}, "block_name_to_quantize"),
        ({"extra_config": {"a b": {}}}, "extra_config"),
        ({"extra_config": {"a": 3}}, "extra_config.a"),
        ({"extra_config": {"a": {"bits": 5}}}, "extra_config.a.bits"),
        ({"extra_config": {"a": {"surprise": 5}}}, "extra_config.a.surprise"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_values_not_understood_are_refused(change: dict[str, object], key: str) -> None:
    with pytest.raises(UnsupportedModel) as failure:
        AutoRoundScheme.parse(PLAIN | change)
    assert failure.value.key == f"quantization_config.{key}"


def test_modules_have_what_is_said_of_them() -> None:
    extra = {"model.layers.0.a": {"bits": 16, "data_type": "float"}, "model.layers.0.b": {"bits": 8, "group_size": 32}}
    scheme = AutoRoundScheme.parse(PLAIN | {"block_name_to_quantize": "model.layers", "extra_config": extra})

    def of(*names: str) -> GptqWords | AwqWords | None:
        return scheme.for_layer(LinearSpec("x", 64, (64,) * len(names), sources=names))

    assert of("model.layers.0.a") is None
    assert of("model.other.c") is None
    other, usual = of("model.layers.0.b"), of("model.layers.0.c")
    assert other is not None
    assert usual is not None
    assert (other.bits, other.group, usual.bits, usual.group) == (8, 32, 4, 64)
    with pytest.raises(UnsupportedModel, match="merged"):
        of("model.layers.0.b", "model.layers.0.c")
