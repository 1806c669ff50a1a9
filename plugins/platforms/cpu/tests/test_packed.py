"""Packed linears: every type and instruction set against float64, and rows that do not depend on one another."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
import torch
from lmkit.api import DeviceInfo, LinearSpec, OpRequest
from lmkit_layers.linear import PLAIN
from lmkit_platform_cpu import check
from lmkit_platform_cpu.native import Native, load
from lmkit_platform_cpu.packed import CompactLinear, NativeLinear, linear, pack, pack_compact
from lmkit_testing import PluginConformance
from torch import Tensor

LIBRARY = load()
needs_library = pytest.mark.skipif(LIBRARY is None, reason="the native library is not built here")
ISAS = LIBRARY.isas if LIBRARY is not None else ()
TOLERANCE = {torch.float32: 6e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SHAPES = [(1, 1), (33, 7), (64, 64), (100, 129), (5, 0), (70, 1301), (300, 2050)]
ROWS = (0, 1, 2, 5, 13, 64, 65, 131)
LONG = bool(os.environ.get("KERNEL_GRID"))  # set by `nox -s kernels`


class TestLinear(PluginConformance):
    plugin = "op:linear_native"


class TestCompactLinear(PluginConformance):
    plugin = "op:linear_compact"


@pytest.fixture
def native() -> Iterator[Native]:
    assert LIBRARY is not None
    before = LIBRARY.threads
    yield LIBRARY
    LIBRARY.set_isa("auto")
    LIBRARY.start(before)


@pytest.mark.one_in(3)
@needs_library
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES if LONG else SHAPES[:-1], ids=str)
def test_equals_the_product_in_float64(native: Native, isa: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Random sizes; rows with gaps between them; each row as if it stood alone, bit for bit; any number of threads."""
    native.set_isa(isa)
    noise = torch.Generator().manual_seed(sum(shape))
    weight = torch.randn(shape, generator=noise).to(dtype)
    native.start(3)
    packed = pack(native, weight.clone(), dtype)
    bias = torch.randn(shape[0], generator=noise).to(dtype)
    for rows, with_bias in itertools.product(ROWS, (True, False)):
        wide = torch.full((rows, shape[1] + 3), torch.nan, dtype=dtype)
        x = wide[:, : shape[1]]
        x.copy_(torch.randn(x.shape, generator=noise))
        added = bias if with_bias else None
        got = linear(native, x, packed, added)
        expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
        assert got.shape == expected.shape
        if rows:
            worst = (got.double() - expected).abs().max() / max(1.0, float(expected.abs().max()))
            assert worst <= TOLERANCE[dtype], f"{rows} rows: off by {worst:.2e}"
        for row in {0, rows // 2, rows - 1} if rows else ():
            assert torch.equal(linear(native, x[row : row + 1], packed, added)[0], got[row]), f"row {row} of {rows}"
        native.start(1)
        assert torch.equal(linear(native, x, packed, added), got), "the same on one thread"
        native.start(3)


@needs_library
@pytest.mark.parametrize("isa", ISAS)
def test_converts_the_weight(native: Native, isa: str) -> None:
    native.set_isa(isa)
    weight = torch.randn(65, 34)
    for source, target in itertools.product(TOLERANCE, TOLERANCE):
        x = torch.eye(34, dtype=target)
        stored = weight.to(source)
        assert torch.equal(linear(native, x, pack(native, stored, target)).T, stored.to(target))
        assert torch.equal(
            linear(native, x, pack(native, stored[:, ::2].repeat(1, 2), target)).T[:, :17], stored[:, ::2].to(target)
        )


COMPACT_SHAPES = [(1, 8), (33, 64), (100, 256), (70, 1304), (300, 2052)]
VECTORS = tuple(isa for isa in ISAS if isa != "portable")


def weight_with_strays(n: int, k: int, noise: torch.Generator) -> Tensor:
    """Normal values [n, k], a few of them (neighbours) anywhere from 2^-60 to 2^60."""
    weight = (torch.randn(n, k, generator=noise) * 0.02).bfloat16()
    exponents = torch.randint(-60, 61, (n * k // 3000 + 2,), generator=noise).float()
    places = torch.randint(n * k - 1, exponents.shape, generator=noise)
    flat = weight.view(-1)
    flat[places] = flat[places + 1] = (-1.5 * torch.exp2(exponents)).bfloat16()
    return weight


@needs_library
@pytest.mark.parametrize("isa", VECTORS)
@pytest.mark.parametrize(
    "shape", [(1, 8), (33, 64), (100, 256), (70, 1304), *(((300, 2052),) if LONG else ())], ids=str
)
def test_compact_weights_lose_nothing(native: Native, isa: str, shape: tuple[int, int]) -> None:
    """Each value is read as it was, and products are those of plain panels bit for bit, cut along k or not."""
    native.set_isa(isa)
    native.start(3)
    noise = torch.Generator().manual_seed(sum(shape))
    n, k = shape
    weight = weight_with_strays(n, k, noise)
    if k < 64:
        assert pack_compact(native, weight, weight.dtype) is None, "it would take more memory"
        return
    compact, plain = pack_compact(native, weight, weight.dtype), pack(native, weight, weight.dtype)
    assert compact is not None
    assert compact.nbytes <= 0.77 * plain.nbytes or k < 256
    read = linear(native, torch.eye(k).bfloat16(), compact).T
    assert torch.equal(read, weight)
    bias = torch.randn(n, generator=noise).bfloat16()
    for rows in ROWS:
        x = torch.randn(rows, k + 3, generator=noise).bfloat16()[:, :k]
        assert torch.equal(linear(native, x, compact, bias), linear(native, x, plain, bias)), f"{rows} rows"


@needs_library
def test_other_weights_stay_plain(native: Native) -> None:
    kernel, spec = CompactLinear(), LinearSpec("layer", 256, (64,))
    noise = torch.Generator().manual_seed(0)
    exponents = torch.randint(-60, 61, (64, 256), generator=noise).float()
    scattered = torch.exp2(exponents).bfloat16()
    usual = torch.randn(64, 256, generator=noise)
    for weight, dtype in ((scattered, torch.bfloat16), (usual, torch.bfloat16), (usual.half(), torch.float16)):
        packed = kernel.pack(PLAIN, {"weight": weight}, spec, dtype)
        assert not packed.compact
        x = torch.eye(256, dtype=dtype)
        assert torch.equal(kernel.apply(x, packed, None).T, weight.to(dtype))
    assert pack_compact(native, usual[:, :254].bfloat16(), torch.bfloat16) is None
    assert kernel.pack(PLAIN, {"weight": usual.bfloat16()}, spec, torch.bfloat16).compact
    native.set_isa("portable")
    assert "portable" in str(kernel.can_run(PLAIN, spec, DeviceInfo("cpu", "cpu")))


@needs_library
def test_what_does_not_fit_is_refused(native: Native) -> None:
    packed = pack(native, torch.randn(8, 6), torch.float32)
    with pytest.raises(ValueError, match="linear of 6 values"):
        linear(native, torch.randn(2, 5), packed)
    with pytest.raises(ValueError, match="float16"):
        linear(native, torch.randn(2, 6).half(), packed)
    with pytest.raises(ValueError, match="bias of 8"):
        linear(native, torch.randn(2, 6), packed, torch.randn(7))


@needs_library
def test_kernel(native: Native) -> None:
    kernel, spec = NativeLinear(), LinearSpec("layer", 40, (24, 8), bias=True)
    assert kernel.can_run(PLAIN, spec, DeviceInfo("cpu", "cpu")) is None
    weight = torch.randn(32, 40)
    params = {"weight": weight}
    packed = kernel.pack(PLAIN, params, spec, torch.bfloat16)
    assert not params, "the original is given up"
    assert packed.nbytes == weight.nbytes // 2
    x = torch.randn(2, 3, 40).bfloat16()
    expected = torch.nn.functional.linear(x.float(), weight.bfloat16().float())
    torch.testing.assert_close(kernel.apply(x, packed, None).float(), expected, rtol=2e-2, atol=2e-2)


def test_refused_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    (refusal,) = check.native(OpRequest(op="linear", device=DeviceInfo("cpu", "cpu", flags=("avx2",))))
    assert refusal.code == "native"
    assert "compiler" in refusal.offered
    assert not list(check.native(OpRequest(op="linear", device=DeviceInfo("cpu", "cpu", flags=("native",)))))
    monkeypatch.setattr("lmkit_platform_cpu.packed.load", lambda: None)
    assert NativeLinear().can_run(PLAIN, LinearSpec("layer", 4, (4,)), DeviceInfo("cpu", "cpu"))
