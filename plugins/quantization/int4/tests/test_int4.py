"""4 bits, rounded while loading: the format and the kernel."""

from __future__ import annotations

import pytest
import torch
from lmkit.api import LinearSpec, UnsupportedModel
from lmkit_quantization_int4.scheme import Int4Scheme
from lmkit_testing import QuantizationConformance


class TestInt4(QuantizationConformance):
    plugin = "quantization:int4"
    configs = {"default": {}, "fine": {"group_size": 32}, "symmetric": {"group_size": 128, "zero_points": False}}
    kernels = ("linear_integer_native",)
    tolerance = {"float32": 3e-2, "bfloat16": 4e-2}


class TestInt4WithFloatActivations(QuantizationConformance):
    plugin = "quantization:int4"
    configs = {"default": {"activations": "float"}}
    kernels = ("linear_integer_native",)
    tolerance = {"float32": 1e-4, "bfloat16": 2e-2}


@pytest.mark.parametrize("zero_points", [True, False])
def test_rounds_to_nearest(zero_points: bool) -> None:
    layer = LinearSpec("layer", 100, (7,))
    weight = torch.randn(7, 100)
    weight[3] = 0
    weight[4] = weight[4].abs() + 5
    fmt = Int4Scheme(32, zero_points).for_layer(layer)
    found = fmt.dequantize({"weight": weight}, torch.float32)
    steps = fmt.integers({"weight": weight}).scales.repeat_interleave(32, 1)[:, :100]
    assert ((found - weight).abs() <= steps * 1.01).all()
    assert not found[3].any()


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="48"):
        Int4Scheme.parse({"group_size": 48})
    with pytest.raises(ValueError, match="int16"):
        Int4Scheme.parse({"activations": "int16"})
    with pytest.raises(UnsupportedModel, match="bits"):
        Int4Scheme.parse({"bits": 3})


@pytest.mark.parametrize(("options", "name"), [({}, "int8"), ({"head": "int4"}, "int4"), ({"head": "none"}, None)])
def test_the_output_head_keeps_more(options: dict[str, str], name: str | None) -> None:
    scheme = Int4Scheme.parse(options)
    head = scheme.for_layer(LinearSpec("lm_head", 128, (512,)))
    assert (head and head.name) == name
    other = scheme.for_layer(LinearSpec("layers.0.mlp.down", 128, (512,)))
    assert other is not None
    assert other.name == "int4"
    with pytest.raises(ValueError, match="head"):
        Int4Scheme.parse({"head": "int2"})


def test_the_head_s_error_is_that_of_8_bits() -> None:
    weight = torch.randn(64, 128)
    errors = []
    for name in ("lm_head", "layers.0.mlp.down"):
        fmt = Int4Scheme().for_layer(LinearSpec(name, 128, (64,)))
        assert fmt is not None
        errors.append(float((fmt.dequantize({"weight": weight}, torch.float32) - weight).norm()))
    assert errors[0] < errors[1] / 8
