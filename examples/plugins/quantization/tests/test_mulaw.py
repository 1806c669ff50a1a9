import pytest
import torch
from lmkit.api import UnsupportedModel
from lmkit_quantization_mulaw.scheme import MuLaw, MuLawRows, quantized
from lmkit_testing import QuantizationConformance


class TestMuLaw(QuantizationConformance):
    plugin = "quantization:mulaw"
    configs = {"default": {"quant_method": "mulaw"}, "other": {"quant_method": "mulaw", "mu": 40, "skip": ["m.v"]}}
    kernels = ("linear_reference",)  # and those of your own


def test_what_is_written_is_read_back():
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    error = (MuLawRows(255.0).dequantize(quantized(weight, 255.0), torch.float32) - weight).abs()
    assert (error <= 0.03 * weight.abs() + 1e-3).all()  # relative: small weights are as exact as large ones


@pytest.mark.parametrize("wrong", [{"mu": 0}, {"mu": "255"}, {"skip": "lm_head"}])
def test_nonsense_is_refused(wrong):
    with pytest.raises(UnsupportedModel, match=next(iter(wrong))):
        MuLaw.parse(wrong)
