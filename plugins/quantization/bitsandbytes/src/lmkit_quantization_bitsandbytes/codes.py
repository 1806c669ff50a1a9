"""Codes of four bits, and what they are worth."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from lmkit.api import CheckpointError, Integers
from torch import Tensor
from torch.nn import functional as F

SLICE = 1 << 18  # values worked on at a time: what a processor's cache holds
# Quantiles of the normal distribution, and floating point numbers of 1, 2 and 1 bits: `get_4bit_type` of bitsandbytes.
VALUES: Mapping[str, tuple[float, ...]] = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": tuple(
        sign * value / 12 for sign in (1, -1) for value in (0, 0.0625, 8, 12, 4, 6, 2, 3)
    ),
}  # fmt: skip
STEPS: Mapping[str, int] = {
    "nf4": 127,
    "fp4": 126,
}  # of 1, for kernels of integers; most values of FP4 are some of these
ZERO = 127
LARGEST = torch.finfo(torch.float16).max


@cache
def table(name: str) -> Tensor:
    """What each code is worth: [16] float32."""
    return torch.tensor(VALUES[name], dtype=torch.float32)


@cache
def pairs(name: str) -> Tensor:
    """What the two codes of each byte are worth, the high one first: [256, 2] float32."""
    one = table(name)
    return torch.stack([one.repeat_interleave(16), one.repeat(16)], 1)


def dequantize(weight: Tensor, absmax: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """weight uint8 [out, in / 2], absmax float32 [out, groups] -> [out, in], rounded once."""
    n, k = weight.shape[0], weight.shape[1] * 2
    out, values = weight.new_empty((n, k), dtype=dtype), pairs(name).to(weight.device)
    for rows in _slices(n, k):
        found = F.embedding(weight[rows].int(), values).view(-1, absmax.shape[1], k // absmax.shape[1])
        out[rows] = (found * absmax[rows, :, None]).flatten(1)
    return out


def rounded(weight: Tensor, block: int, name: str, dtype: torch.dtype) -> Tensor:
    """[out, in] -> [out, in]: the nearest of the sorted values, times the largest of every `block` columns of a row."""
    out, values = torch.empty_like(weight, dtype=dtype), table(name).to(weight.device)[:, None]
    for rows in _slices(*weight.shape):
        codes, absmax = nearest(weight[rows], block, name)
        found = F.embedding(codes.int(), values)[..., 0]
        out[rows] = found * absmax.repeat_interleave(block, 1)[:, : found.shape[1]]
    return out


def nearest(weight: Tensor, block: int, name: str) -> tuple[Tensor, Tensor]:
    """[out, in] -> codes uint8 [out, in] and the largest of every `block` columns of a row, float32 [out, blocks]."""
    n, k = weight.shape
    values, blocks = table(name).to(weight.device), -(-k // block)
    codes, absmax = weight.new_empty((n, k), dtype=torch.uint8), weight.new_empty((n, blocks), dtype=torch.float32)
    for rows in _slices(n, k):
        padded = F.pad(weight[rows].float(), (0, -k % block)).unflatten(1, (-1, block))
        absmax[rows] = padded.abs().amax(-1)
        scaled = padded * (1 / absmax[rows, :, None].clamp(min=1e-38))
        codes[rows] = torch.bucketize(scaled, (values[:-1] + values[1:]) / 2, out_int32=True).flatten(1)[:, :k].byte()
    return codes, absmax


def unpacked(weight: Tensor) -> Tensor:
    """uint8 [out, in / 2], the high code of a byte first -> uint8 [out, in]."""
    return torch.stack([weight >> 4, weight & 15], -1).flatten(1)


def integers(codes: Tensor, absmax: Tensor, name: str) -> Integers:
    """Codes [out, in] whose values are rounded to 1 / STEPS of the largest. Raises CheckpointError for scales that are
    no float16."""
    scales = absmax / STEPS[name]
    if not bool((scales <= LARGEST).all()):
        raise CheckpointError("scales (absmax) are too large: run it with --op linear_reference")
    values = (table(name) * STEPS[name]).round() + ZERO
    return Integers(codes, scales, ZERO, table=values.to(torch.uint8))


def _slices(rows: int, columns: int) -> list[slice]:
    """Rows to work on at a time."""
    step = max(1, SLICE // max(columns, 1))
    return [slice(first, first + step) for first in range(0, rows, step)]
