"""The kernels in plain torch: the same tiles, steps, addresses and bits, one block after another.

Operators over them are compared with the numbers of the formats.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from lmkit.api import LinearSpec, QuantFormat
from lmkit_op_cutlass.codes import BASE, LOW_BITS, ONE, PIECE, fragment
from lmkit_op_cutlass.tiles import ALIGNED, LINE, Tile, band_of, place, tile_for
from lmkit_testing.host import make_device
from torch import Tensor

H100 = make_device("cuda", cc=(9, 0))
BLOCKS = 5  # that run at a time
PLACES = [torch.tensor([fragment(thread, value) for thread in range(128)]).T for value in range(8)]


def multiply(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    scales: str = "",
    factors: tuple[Tensor | None, ...] = (None, None),
    group: int | None = None,
    arch: str = "sm_90a",
) -> None:
    """As `launch.multiply`. AssertionError: operands that kernels do not take, results left out or written twice."""
    t, n = len(x), out.shape[1]
    check(x, weight, out, bias, factors, scales, group)
    tile = tile_for(arch, t, bool(scales) or group is not None)
    rows, columns = -(-n // tile.rows), -(-t // tile.tokens)
    written = torch.zeros(t, n)
    for block in range(min(BLOCKS, rows * columns)):
        for number in range(block, rows * columns, BLOCKS):
            row, column = place(number, rows, band_of(rows))
            features = slice(row * tile.rows, min((row + 1) * tile.rows, n))
            tokens = slice(column * tile.tokens, min((column + 1) * tile.tokens, t))
            sums = tile_of(x[tokens], weight, tile, features, tokens, scales, factors, group)
            if scales == "rows":
                sums = sums * (factors[0][0, features, None] * factors[1][tokens, 0])
            sums = sums if bias is None else sums + bias[features, None].float()
            out[tokens, features] = sums.t().to(out.dtype)
            written[tokens, features] += 1
    assert (written == 1).all()


def check(
    x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None, factors: tuple[Tensor | None, ...], scales: str,
    group: int | None,
) -> None:  # fmt: skip
    for tensor in (x, weight, out, bias, *factors):
        assert tensor is None or tensor.is_contiguous()
    assert x.data_ptr() % ALIGNED == weight.data_ptr() % ALIGNED == 0
    (t, k), n = x.shape, out.shape[1]
    assert t > 0
    assert k * x.element_size() % ALIGNED == 0
    assert len(out) == t
    assert bias is None or (bias.dtype, bias.shape) == (out.dtype, (n,))
    if group is not None:
        pieces = -(-n // (2 * PIECE)) * 2
        assert (weight.dtype, weight.shape) == (torch.int32, (pieces, -(-k // PIECE), 128, 4))
        groups = -(-k // group) if group else 1
        assert (factors[0].dtype, factors[0].shape) == (torch.int32, (groups, pieces * PIECE))
        assert x.dtype == out.dtype
        return
    assert weight.shape == (n, k)
    assert weight.dtype == x.dtype
    shapes = {"": (None, None), "rows": ((1, n), (t, 1)), "blocks": ((k // 128, n), (k // 128, t))}[scales]
    for factor, shape in zip(factors, shapes, strict=True):
        assert (factor is None) == (shape is None)
        assert factor is None or (factor.dtype, factor.shape) == (torch.float32, shape)


def tile_of(
    x: Tensor, weight: Tensor, tile: Tile, features: slice, tokens: slice, scales: str,
    factors: tuple[Tensor | None, ...], group: int | None,
) -> Tensor:  # fmt: skip
    """Sums of a tile [features, tokens] float32, step by step."""
    sums = torch.zeros(features.stop - features.start, len(x))
    depth = LINE // x.element_size()
    for step in range(-(-x.shape[1] // depth)):
        part = x[:, step * depth : (step + 1) * depth].float()
        if group is not None:
            whole = torch.nn.functional.pad(part, (0, depth - part.shape[1]))
            sums += codes_of(whole, weight, factors[0], tile, features, step, group, x.dtype)
            continue
        ours = weight[features, step * depth : (step + 1) * depth].float() @ part.t()
        sums += ours * (factors[0][step, features, None] * factors[1][step, tokens]) if scales == "blocks" else ours
    return sums


def codes_of(
    x: Tensor, codes: Tensor, factors: Tensor, tile: Tile, features: slice, step: int, group: int, kind: torch.dtype
) -> Tensor:
    """One step over codes: spans of a group multiply on their own, and are scaled then."""
    span = min(group or PIECE, PIECE)
    sums = torch.zeros(tile.rows, len(x))
    for i in range(PIECE // span):
        at = (
            step // (group // PIECE)
            if group > PIECE
            else min(step * (PIECE // span) + i, len(factors) - 1)
            if group
            else 0
        )
        words = factors[at, features.start : features.start + tile.rows]
        scale = (words & 0xFFFF).to(torch.int16).view(torch.float16).float()
        zero = (words >> 16).to(torch.int16).view(kind).float()
        for piece in range(tile.rows // PIECE):
            rows = slice(piece * PIECE, (piece + 1) * PIECE)
            values = widened(codes[features.start // PIECE + piece, step], kind)
            less = (values - zero[rows, None])[:, i * span : (i + 1) * span]
            assert torch.equal(less, less.to(kind).float())  # exact
            sums[rows] += (less @ x[:, i * span : (i + 1) * span].t()) * scale[rows, None]
    return sums[: features.stop - features.start]


def widened(words: Tensor, kind: torch.dtype) -> Tensor:
    """int32 [128, 4] of a piece -> what its codes are with BASE added, [64, 64], by the masks of the kernel."""
    one = ONE["bf16x2" if kind is torch.bfloat16 else "f16x2"]
    found = torch.full((PIECE, PIECE), float("nan"))
    for part in range(4):
        for pair in range(4):
            both = (((words[:, part] >> (4 * pair)) & LOW_BITS) | one).contiguous()
            halves = both.view(torch.int16).view(kind).float().view(-1, 2)
            for half in range(2):
                rows, columns = PLACES[2 * pair + half]
                assert found[rows, columns + 16 * part].isnan().all()
                found[rows, columns + 16 * part] = halves[:, half]
    assert ((found >= BASE[kind]) & (found < BASE[kind] + 16)).all()
    return found


# --------------------------------------------------------------------------------------------------- comparisons


@contextmanager
def plain() -> Iterator[None]:
    """The kernels that are launched are those of this file."""
    module = ModuleType("lmkit_op_cutlass.launch")
    module.multiply = multiply  # type: ignore[attr-defined]
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        del sys.modules[module.__name__]
        if before is not None:
            sys.modules[module.__name__] = before


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(fmt: QuantFormat, layer: LinearSpec, dtype: str, seed: int = 0) -> dict[str, Tensor]:
    """Tensors of a format as a file has them: any codes and zeros, scales of two magnitudes."""
    found = {}
    for i, (name, p) in enumerate(fmt.params(layer, dtype).items()):
        if (
            name
            in (
                "g_idx",
                "input_scale",
                "activation_scale",
                "weight_scale_inv",
                "weight_g_idx",
                "weight_shape",
                "input_zero_point",
            )
            and p.optional
        ):
            continue
        values, kind = noise(seed + i, *p.shape), getattr(torch, p.dtype)
        if kind.is_floating_point:
            found[name] = (values.abs() / 8 + 0.01 if "scale" in name else values).to(kind)
        else:
            found[name] = values.mul(2**30).clamp(-(2**31), 2**31 - 1).to(kind)
    return found


def compare(kernel: Any, fmt: QuantFormat, layer: LinearSpec, params: Mapping[str, Tensor], x: Tensor, given: Tensor,
            bias: Tensor | None) -> None:  # fmt: skip
    """Whatever the kernel makes of x is what the format's own numbers make of `given`, rounded once."""
    assert kernel.can_run(fmt, layer, H100) is None
    weight = fmt.dequantize(dict(params), torch.float64)
    packed = kernel.pack(fmt, {name: value.clone() for name, value in params.items()}, layer, x.dtype)
    assert packed.nbytes > 0
    found = kernel.apply(x, packed, bias)
    wanted = torch.nn.functional.linear(given.double(), weight, None if bias is None else bias.double())
    assert (found.shape, found.dtype) == (wanted.shape, x.dtype)
    scale = float(wanted.abs().max())
    limit = 2**-8 if x.dtype is torch.bfloat16 else 2**-11
    torch.testing.assert_close(found.double(), wanted, rtol=limit, atol=1e-5 * scale)
