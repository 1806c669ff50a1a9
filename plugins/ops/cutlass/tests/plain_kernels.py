"""The kernels in plain torch: the same tiles, steps, addresses and bits, one block after another."""

from __future__ import annotations

import torch
from lmkit_op_cutlass.codes import BASE, LOW_BITS, ONE, PIECE, fragment
from lmkit_op_cutlass.tiles import ALIGNED, LINE, Tile, band_of, place, tile_for
from torch import Tensor

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
