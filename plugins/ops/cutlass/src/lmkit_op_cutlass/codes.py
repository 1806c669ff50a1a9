"""Weights of 4 bits as `sm90_int4` reads them: by piece, thread and part of a step, in the order that wgmma wants."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lmkit.api import Integers
    from torch import Tensor

PIECE = 64  # rows and columns of a piece, which 128 threads multiply
THREADS = 128  # that multiply a piece
WORDS = 4  # of a thread and piece, each the codes of 16 columns
LOW_BITS = 0x000F000F
ONE = {"bf16x2": 0x43004300, "f16x2": 0x64006400}  # 128 and 1024, whose last bits are worth 1: or-ing a code adds it
BASE = {torch.bfloat16: 128, torch.float16: 1024}


def fragment(thread: int, value: int) -> tuple[int, int]:
    """Row and column, of 64 x 16, of one of the 8 values that a thread of 128 holds of the left operand.

    Source: PTX ISA, register fragments of wgmma.mma_async.m64nNk16.
    """
    warp, lane = divmod(thread, 32)
    row = 16 * warp + lane // 4 + 8 * (value // 2 % 2)
    return row, 2 * (lane % 4) + value % 2 + 8 * (value // 4)


def nibble(value: int) -> int:
    """Where in a word a value's code is: those of a pair lie 16 bits apart, so that one mask takes both."""
    return value // 2 + 4 * (value % 2)


def fragments(codes: Tensor) -> Tensor:
    """uint8 [n, k] of 4 bits -> int32 [pieces of rows, pieces of columns, 128, 4], the rows of pairs of pieces."""
    n, k = codes.shape
    codes = torch.nn.functional.pad(codes, (0, -k % PIECE, 0, -n % (2 * PIECE)))
    pieces = codes.view(len(codes) // PIECE, PIECE, -1, WORDS, 16)
    pieces = pieces.permute(0, 2, 3, 1, 4)  # piece of rows, piece of columns, part, row, column
    found = pieces.new_zeros((*pieces.shape[:2], THREADS, WORDS), dtype=torch.int32)
    for value in range(8):
        rows, columns = torch.tensor([fragment(thread, value) for thread in range(THREADS)], device=codes.device).T
        found |= pieces[..., rows, columns].transpose(-1, -2).to(torch.int32) << 4 * nibble(value)
    return found


def factors(found: Integers, dtype: torch.dtype) -> Tensor:
    """int32 [groups, rows of pairs of pieces]: a scale in float16 below, and above it BASE + zero in `dtype`."""
    scales = found.scales.to(torch.float16)
    zeros = torch.as_tensor(found.zeros, device=scales.device).expand(scales.shape)
    above = (zeros.float() + BASE[dtype]).to(dtype).view(torch.int16).to(torch.int32) << 16
    below = scales.view(torch.int16).to(torch.int32) & 0xFFFF
    words = (above | below).t()
    return torch.nn.functional.pad(words, (0, -words.shape[1] % (2 * PIECE))).contiguous()
