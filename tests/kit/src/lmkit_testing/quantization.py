"""Conformance of quantization plugins: a scheme's formats, and kernels against the format's own dequantization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from lmkit.api import (
    CannotSplit,
    DeviceInfo,
    LinearSpec,
    OpSpec,
    ParamSpec,
    PluginError,
    QuantFormat,
    QuantizationSpec,
    UnsupportedModel,
)
from lmkit_layers.linear import Linear, ReferenceLinear
from lmkit_worker.loading.load import places
from torch import Tensor

from lmkit_testing.specs import PluginConformance, find_plugin
from lmkit_testing.steps import Ranks

LAYERS = (
    LinearSpec("plain", 256, (384,), sources=("m.plain",)),
    LinearSpec("merged", 256, (256, 128, 128), True, "column", ("q", "k", "v"), ("m.q", "m.k", "m.v")),
    LinearSpec("ragged", 200, (72, 40), False, "column", ("gate", "up"), ("m.gate", "m.up")),
)


class QuantizationConformance(PluginConformance):
    """Set `plugin` ("quantization:mine"), `configs`: name -> quantization_config, and `kernels`: names of op plugins.

    Override `stored` when random values of the declared dtypes are no valid weights of the format, and `layers` when
    the format restricts sizes.
    """

    configs: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    kernels: ClassVar[tuple[str, ...]] = ()
    layers: ClassVar[tuple[LinearSpec, ...]] = LAYERS
    tolerance: ClassVar[Mapping[str, float]] = {"float32": 1e-5, "bfloat16": 2e-2}  # relative to the largest output

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for name, values in (("config", self.configs), ("kernel_name", self.kernels), ("layer", self.layers)):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, list(values), ids=[getattr(v, "name", v) for v in values])

    def stored(self, fmt: QuantFormat, layer: LinearSpec, seed: int = 0) -> dict[str, Tensor]:
        """Random stored tensors as the format declares them; optional ones are left out."""
        noise = torch.Generator().manual_seed(seed)

        def tensor(p: ParamSpec) -> Tensor:
            dtype = getattr(torch, p.dtype)
            if not dtype.is_floating_point:
                info = torch.iinfo(dtype)
                return torch.randint(info.min, info.max, p.shape, generator=noise).to(dtype)
            spread = torch.rand(p.shape, generator=noise) + 0.5
            return (torch.randn(p.shape, generator=noise) * spread).to(dtype)

        return {name: tensor(p) for name, p in fmt.params(layer, "float32").items() if not p.optional}

    def format(self, target: Any, config: str, layer: LinearSpec) -> QuantFormat:
        fmt = target.parse(self.configs[config]).for_layer(layer)
        if fmt is None:
            pytest.skip("this layer is left unquantized")
        return fmt

    def test_parse_is_strict(self, target: Any, config: str) -> None:
        """An unknown key is refused by name; parsing is pure."""
        assert target.parse(self.configs[config]) == target.parse(dict(self.configs[config]))
        with pytest.raises(UnsupportedModel) as failure:
            target.parse({**self.configs[config], "key_of_the_future": 1})
        assert "key_of_the_future" in failure.value.message

    def test_formats_are_declared(self, target: Any, spec: QuantizationSpec, config: str, layer: LinearSpec) -> None:
        fmt = self.format(target, config, layer)
        assert fmt.name in spec.weight_formats
        params = fmt.params(layer, "bfloat16")
        assert set(params) <= set(spec.tensors) or not spec.tensors
        for name, p in params.items():
            if p.part_axis is not None and layer.parts:
                sizes = p.part_sizes or layer.out_features
                assert len(sizes) == len(layer.parts), name
                assert sum(sizes) == p.shape[p.part_axis], name

    def test_dequantize_gives_the_weight(self, target: Any, config: str, layer: LinearSpec) -> None:
        fmt = self.format(target, config, layer)
        weight = fmt.dequantize(self.stored(fmt, layer), torch.float32)
        assert weight.shape == (layer.total_out, layer.in_features)
        assert weight.dtype == torch.float32
        assert torch.isfinite(weight).all()

    def test_shards_are_shards_of_the_weight(self, target: Any, config: str, layer: LinearSpec) -> None:
        """What each of two ranks loads dequantizes to its part of the weight, or the split is refused."""
        fmt = self.format(target, config, layer)
        stored = self.stored(fmt, layer)
        weight = fmt.dequantize(stored, torch.float32)
        for shard in ("column", "row"):
            spec = replace(layer, shard=shard, bias=False)
            try:
                with torch.device("meta"):
                    ranks = [Linear(spec, fmt, ReferenceLinear(), torch.float32, Ranks(2).rank(r)) for r in range(2)]
            except (CannotSplit, PluginError):
                continue
            for rank, module in enumerate(ranks):
                for place in places(module).values():
                    if place.attribute in stored:
                        value, axis = stored[place.attribute], place.stored.part_axis
                        values = [value] * len(place.parts)  # one that they share
                        if axis is not None and layer.parts:
                            values = list(value.split(place.stored_sizes, axis))
                        for part, each in zip(place.parts, values, strict=True):
                            place.put(part, each, torch.device("cpu"))
                mine = fmt.dequantize({key: getattr(module, key).data for key in stored}, torch.float32)
                rows = weight.split(layer.out_features) if shard == "column" else (weight,)
                expected = torch.cat([part.chunk(2, 0 if shard == "column" else 1)[rank] for part in rows])
                assert torch.equal(mine, expected), f"{shard} shard of rank {rank}"

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_kernel_equals_dequantized_matmul(
        self, target: Any, config: str, layer: LinearSpec, kernel_name: str, dtype: str
    ) -> None:
        _, _, op = find_plugin(f"op:{kernel_name}")
        assert isinstance(op, OpSpec)
        fmt = self.format(target, config, layer)
        assert not op.formats or fmt.name in op.formats
        from lmkit.plugins import load_target

        kernel = load_target(op.target)()
        if reason := kernel.can_run(fmt, layer, DeviceInfo("cpu", "cpu")):
            pytest.skip(reason)
        torch_dtype = getattr(torch, dtype)
        packed = kernel.pack(fmt, self.stored(fmt, layer), layer, torch_dtype)
        assert packed.nbytes > 0
        weight = fmt.dequantize(self.stored(fmt, layer), torch.float64)
        for shape in ((1,), (5,), (2, 3)):
            x = torch.randn(*shape, layer.in_features, generator=torch.Generator().manual_seed(1)).to(torch_dtype)
            bias = torch.randn(layer.total_out, generator=torch.Generator().manual_seed(2)).to(torch_dtype)
            expected = x.double() @ weight.T + bias.double()
            got = kernel.apply(x, packed, bias)
            assert got.shape == expected.shape
            assert got.dtype == torch_dtype
            worst = float((got.double() - expected).abs().max() / expected.abs().max())
            assert worst <= self.tolerance[dtype], f"off by {worst:.2e}"
            assert torch.equal(kernel.apply(x, packed, None), kernel.apply(x, packed, None))
