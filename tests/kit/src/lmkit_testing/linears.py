"""LinearConformance: a kernel of linears gives what the reference gives, whatever the sizes, rows and batch."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from lmkit.api import DeviceInfo, LinearSpec, OpSpec
from lmkit_layers.linear import PlainFormat
from torch import Tensor

from lmkit_testing.quantization import LAYERS
from lmkit_testing.specs import PluginConformance

ROWS = ((1,), (5,), (2, 3), (0,))


class LinearConformance(PluginConformance):
    """A kernel of plain weights. Of other formats: QuantizationConformance, whose `kernels` name it."""

    tolerance: ClassVar[dict[str, float]] = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}  # of the largest value

    @pytest.fixture(params=LAYERS, ids=lambda layer: layer.name)
    def layer(self, request: pytest.FixtureRequest) -> LinearSpec:
        found: LinearSpec = request.param
        return found

    @pytest.fixture(params=["float32", "bfloat16", "float16"])
    def dtype(self, request: pytest.FixtureRequest, spec: OpSpec) -> str:
        if spec.dtypes and request.param not in spec.dtypes:
            pytest.skip(f"{request.param} is not declared")
        return str(request.param)

    def packed(self, kernel: Any, layer: LinearSpec, dtype: str) -> tuple[Tensor, Any]:
        """The weight in float64, and as the kernel keeps it."""
        fmt = PlainFormat()
        if reason := kernel.can_run(fmt, layer, DeviceInfo("cpu", "cpu")):
            pytest.skip(reason)
        noise = torch.Generator().manual_seed(0)
        weight = torch.randn(layer.total_out, layer.in_features, generator=noise).to(getattr(torch, dtype))
        return weight.double(), kernel.pack(fmt, {"weight": weight.clone()}, layer, weight.dtype)

    def test_plain_weights_are_declared(self, spec: OpSpec) -> None:
        assert spec.op == "linear"
        assert not spec.formats or "plain" in spec.formats, "of other formats: QuantizationConformance"

    def test_products(self, target: Any, layer: LinearSpec, dtype: str) -> None:
        kernel = target()
        weight, packed = self.packed(kernel, layer, dtype)
        assert packed.nbytes > 0
        noise = torch.Generator().manual_seed(1)
        bias = torch.randn(layer.total_out, generator=noise).to(getattr(torch, dtype))
        for shape in ROWS:
            x = torch.randn(*shape, layer.in_features, generator=noise).to(bias.dtype)
            for given in (bias, None):
                got = kernel.apply(x, packed, given)
                expected = x.double() @ weight.T + (0 if given is None else given.double())
                assert (got.shape, got.dtype) == (expected.shape, x.dtype)
                if got.numel():
                    worst = float((got.double() - expected).abs().max() / expected.abs().max())
                    assert worst <= self.tolerance[dtype], f"off by {worst:.2e} of the largest output"

    def test_inputs_stay_as_they_are(self, target: Any, layer: LinearSpec, dtype: str) -> None:
        kernel = target()
        _, packed = self.packed(kernel, layer, dtype)
        x = torch.randn(3, layer.in_features).to(getattr(torch, dtype))
        before, first = x.clone(), kernel.apply(x, packed, None)
        assert torch.equal(x, before)
        assert torch.equal(kernel.apply(x, packed, None), first), "the same every time"

    def test_what_is_not_finite_shows(self, target: Any, layer: LinearSpec, dtype: str) -> None:
        kernel = target()
        _, packed = self.packed(kernel, layer, dtype)
        x = torch.zeros(2, layer.in_features).to(getattr(torch, dtype))
        x[1, 3] = torch.nan
        got = kernel.apply(x, packed, None)
        assert got[0].isfinite().all()
        assert got[1].isnan().all()
