"""8 bits, rounded while loading: the formats, the kernel, and a model that still says what it said."""

from __future__ import annotations

import pytest
import torch
from lmkit.api import LinearSpec, UnsupportedModel
from lmkit_quantization_int8.scheme import Int8Scheme, W8A8Scheme
from lmkit_testing import QuantizationConformance


class TestInt8(QuantizationConformance):
    plugin = "quantization:int8"
    configs = {"rows": {}, "groups": {"group_size": 32}}
    kernels = ("linear_integer_native",)
    tolerance = {"float32": 1e-4, "bfloat16": 2e-2}


class TestW8A8(QuantizationConformance):
    plugin = "quantization:w8a8"
    configs = {"default": {}}
    kernels = ("linear_integer_native",)
    tolerance = {"float32": 3e-2, "bfloat16": 4e-2}


@pytest.mark.parametrize("group", [0, 32])
def test_rounds_to_nearest(group: int) -> None:
    layer = LinearSpec("layer", 100, (7,))
    weight = torch.randn(7, 100)
    weight[3] = 0
    fmt = Int8Scheme(group).for_layer(layer)
    found = fmt.dequantize({"weight": weight}, torch.float32)
    steps = fmt.integers({"weight": weight}).scales.repeat_interleave(group or 100, 1)[:, :100]
    assert ((found - weight).abs() <= steps * 0.51).all()
    assert not found[3].any()


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="48"):
        Int8Scheme.parse({"group_size": 48})
    with pytest.raises(UnsupportedModel, match="bits"):
        W8A8Scheme.parse({"bits": 4})
