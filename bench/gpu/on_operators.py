"""Operators on the device beside the reference on the CPU: rows in float32, linears in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conformance import tested
from linears import FORMATS, SHAPES, kernels
from lmkit.api import DrawParams, LmkitError
from lmkit.plugins import load_target
from lmkit.plugins.host import PluginHost
from lmkit_layers.rowwise import TorchRowOps
from torch import Tensor

MACHINE = tested()
REFERENCE = TorchRowOps()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(params=MACHINE.offered("op", "rowwise"))
def ops(request: pytest.FixtureRequest) -> Any:
    return load_target(PluginHost().load("op", request.param).target)()


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def there(x: Tensor) -> Tensor:
    """A copy on the device."""
    return x.to(MACHINE.device, copy=True)


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    torch.testing.assert_close(found.float().cpu(), wanted.float(), rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 7), (3, 1000), (70, 4096), (5, 8192)])
def test_norms(ops: Any, dtype: torch.dtype, rows: int, size: int) -> None:
    x, h, weight, bias = (
        noise(*s, dtype=dtype, seed=i) for i, s in enumerate([(rows, size), (rows, size), (size,), (size,)])
    )
    close(ops.rms_norm(there(x), there(weight), 1e-5), REFERENCE.rms_norm(x.float(), weight.float(), 1e-5), dtype)
    residual = there(h)
    found = ops.rms_norm(there(x), there(weight), 1e-5, residual)
    assert torch.equal(residual.cpu(), h + x)
    close(found, REFERENCE.rms_norm((h + x).float(), weight.float(), 1e-5), dtype)
    wanted = REFERENCE.layer_norm(x.float(), weight.float(), bias.float(), 1e-5)
    close(ops.layer_norm(there(x), there(weight), there(bias), 1e-5), wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "relu2"])
def test_activations(ops: Any, dtype: torch.dtype, name: str) -> None:
    for rows, size in ((1, 33), (9, 14336)):
        x = noise(rows, 2 * size, dtype=dtype) * 2
        close(ops.gate(there(x), name), REFERENCE.gate(x.float(), name), dtype)
        close(ops.activate(there(x), name), REFERENCE.activate(x.float(), name), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_turning(ops: Any, dtype: torch.dtype, interleaved: bool) -> None:
    positions, frequencies = torch.tensor([0, 1, 77, 4000]), 1.0 / 10000 ** torch.linspace(0, 1, 32)
    cos, sin = REFERENCE.angles(positions, frequencies, 1.0)
    found = ops.angles(there(positions), there(frequencies), 1.0)
    for got, wanted in zip(found, (cos, sin), strict=True):
        torch.testing.assert_close(got.cpu(), wanted, rtol=0, atol=2e-4)  # float32 angles of thousands
    for heads, size in ((1, 64), (32, 128)):
        x = noise(len(positions), heads, size, dtype=dtype)
        turned, wanted = there(x), x.float()
        ops.rotate(turned, there(cos), there(sin), interleaved)
        REFERENCE.rotate(wanted, cos, sin, interleaved)
        close(turned, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding_and_addition(ops: Any, dtype: torch.dtype) -> None:
    table, ids = noise(1000, 96, dtype=dtype), torch.tensor([3, 999, 0, 3])
    assert torch.equal(ops.embed(there(ids), there(table)).cpu(), table[ids])
    x, y = noise(5, 96, dtype=dtype), noise(5, 96, dtype=dtype, seed=1)
    close(ops.add(there(x), there(y), there(x)), (x + y).float(), dtype)


@pytest.mark.parametrize("vocab", [300, 128256])
def test_drawing(ops: Any, vocab: int) -> None:
    """The most likely token of each row; and of the same share, the reference's token of nearly every row."""
    x = noise(16, vocab) * 3
    tokens, largest = ops.argmax(there(x))
    assert torch.equal(tokens.cpu(), x.argmax(-1))
    assert torch.equal(largest.cpu(), x.amax(-1))
    n, share = len(x), np.linspace(0.01, 0.99, len(x))
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (20, 1.0, 0.0), (0, 0.9, 0.0), (50, 0.8, 0.02)):
        params = DrawParams(
            np.full(n, 0.8, np.float32), np.full(n, min_p, np.float32), np.full(n, top_k, np.int64),
            np.full(n, top_p, np.float32), share,
        )  # fmt: skip
        found, _ = ops.draw(there(x), params)
        wanted, _ = REFERENCE.draw(x.clone(), params)
        assert (found.cpu() == wanted).float().mean() >= 0.85  # sums of other order may choose a neighbour


@pytest.mark.parametrize("rows", [1, 3, 17, 64, 200])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMATS)
def test_linears(form: str, shape: tuple[int, int], rows: int) -> None:
    """Every kernel that could run the format, against the format's own numbers in float64."""
    try:
        made = kernels(MACHINE, form, *shape)
    except LmkitError as e:
        pytest.skip(f"{form}: {e.message}"[:120])
    if not made:
        pytest.skip(f"{form}: no kernel")
    for each in made:
        packed, weight = each.packed(check=True)
        assert weight is not None
        x = noise(rows, shape[0], dtype=torch.bfloat16)
        found = each.kernel.apply(there(x), packed, None)
        wanted = x.double() @ weight.T
        worst = float((found.cpu().double() - wanted).abs().max() / wanted.abs().max())
        assert worst <= each.tolerance, f"{each.kernel.name}: off by {worst:.2e}"
