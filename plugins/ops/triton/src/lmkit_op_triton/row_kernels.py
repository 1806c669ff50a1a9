"""Linears of one row, and of a few: a weight is read once, and nothing else takes time. x [m, k], weights [n, k].

One row is multiplied entry by entry, without tensor cores, which would multiply 15 rows of zeros beside it: a program
has N rows of the weight, and its threads add up columns of their own until the end.
"""

import triton
import triton.language as tl

from lmkit_op_triton.weight_kernels import BYTE_FLOAT32, HIGH_FLOAT32, LOW_FLOAT32, _code


@triton.jit
def one_row(
    x, weight, bias, out, n, k, w_row, BIAS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Weights as they are: x [k], weight [n, k] -> out [n]."""
    j, i = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, K)
    at = weight + j[:, None].to(tl.int64) * w_row + i[None, :]
    total = tl.zeros([N, K], tl.float32)
    for start in tl.range(0, k, K, num_stages=STAGES):
        left = i < k - start
        a = tl.load(x + start + i, left, 0.0).to(tl.float32)
        w = tl.load(at + start, (j < n)[:, None] & left[None, :], 0.0)
        total += w.to(tl.float32) * a[None, :]
    y = tl.sum(total, 1)
    if BIAS:
        y += tl.load(bias + j, j < n, 0.0).to(tl.float32)
    tl.store(out + j, y.to(out.dtype.element_ty), j < n)


@triton.jit
def few_rows(
    x, weight, bias, out, m, n, k, x_row, w_row, BIAS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Weights as they are: x [m <= M, k], weight [n, k] -> out [m, n]."""
    r, j, i = tl.arange(0, M), tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, K)
    a_at = x + r[:, None] * x_row + i[None, :]
    w_at = weight + j[:, None].to(tl.int64) * w_row + i[None, :]
    y = tl.zeros([M, N], tl.float32)
    for start in tl.range(0, k, K, num_stages=STAGES):
        left = i < k - start
        a = tl.load(a_at + start, (r < m)[:, None] & left[None, :], 0.0)
        w = tl.load(w_at + start, (j < n)[:, None] & left[None, :], 0.0)
        y = tl.dot(a, tl.trans(w), y, input_precision="ieee")
    if BIAS:
        y += tl.load(bias + j, j < n, 0.0).to(tl.float32)[None, :]
    tl.store(out + r[:, None] * n + j[None, :], y.to(out.dtype.element_ty), (r < m)[:, None] & (j < n)[None, :])


@triton.jit
def _plane(
    x, column, k, bits, BITS: tl.constexpr, HIGH: tl.constexpr, N: tl.constexpr, C: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """x times codes of bytes [N, 16 C], added up for each 16 of them: [N, C]; and the sums of x alone, [C].

    A code is put into the last places of 2 ** 23, which is then subtracted.
    """
    a = tl.load(x + column, column < k, 0.0).to(tl.float32)
    if PTX:
        text: tl.constexpr = BYTE_FLOAT32 if BITS == 8 else (HIGH_FLOAT32 if HIGH else LOW_FLOAT32)
        v = tl.inline_asm_elementwise(text, "=f,=f,=f,=f,r", [bits], tl.float32, True, 4)
    else:
        v = (_code(bits, BITS, HIGH).to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
    products = (v - 8388608.0) * a[None, :]
    return tl.sum(tl.reshape(products, [N, C, 16]), 2), tl.sum(tl.reshape(a, [C, 16]), 1)


@triton.jit
def _weighed(
    products, sums, group, j, scales, zeros, offsets, zero, n, there, ZEROS: tl.constexpr, OFFSETS: tl.constexpr
):  # fmt: skip
    """Products with codes [N, C] as those with codes less their zeros, with the scales of their groups [C]."""
    at = group[None, :] * n + j[:, None]
    less = tl.load(zeros + at, there, 0).to(tl.float32) if ZEROS else zero * 1.0
    y = (products - less * sums[None, :]) * tl.load(scales + at, there, 0.0).to(tl.float32)
    if OFFSETS:
        y -= sums[None, :] * tl.load(offsets + at, there, 0.0).to(tl.float32)
    return y


@triton.jit
def one_row_of_codes(
    x, weight, scales, zeros, offsets, bias, out, n, k, width, zero, BIAS: tl.constexpr, ZEROS: tl.constexpr,
    OFFSETS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    STAGES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Codes [n, width bytes] of whole numbers, scales, zeros and offsets [groups, n]: x [k] -> out [n].

    C times 16 bytes of a row at a time; those of 4 bits hold H columns in their low halves and the next H in the high.
    """
    j, c, i = tl.program_id(0) * N + tl.arange(0, N), 16 * tl.arange(0, C), tl.arange(0, 16 * C)
    at = weight + j[:, None].to(tl.int64) * width + i[None, :]
    total = tl.zeros([N, C], tl.float32)
    for start in tl.range(0, width, C * 16, num_stages=STAGES):
        bits = tl.load(at + start, (j < n)[:, None] & (start + i < width)[None, :], 0)
        byte = start + c
        first = byte if BITS == 8 else byte // H * (2 * H) + byte % H
        there = (j < n)[:, None] & (first < k)[None, :]  # rows of codes are filled up, groups are not
        column = start + i if BITS == 8 else (start + i) // H * (2 * H) + (start + i) % H
        products, sums = _plane(x, column, k, bits, BITS, False, N, C, PTX)
        if BITS == 4:
            others, more = _plane(x, column + H, k, bits, 4, True, N, C, PTX)
            if GROUP == 0 or GROUP % (2 * H) == 0:
                products += others
                sums += more
            else:
                group, left = (first + H) // GROUP, there & (first + H < k)[None, :]
                total += _weighed(others, more, group, j, scales, zeros, offsets, zero, n, left, ZEROS, OFFSETS)
        group = first // GROUP if GROUP > 0 else first * 0
        total += _weighed(products, sums, group, j, scales, zeros, offsets, zero, n, there, ZEROS, OFFSETS)
    y = tl.sum(total, 1)
    if BIAS:
        y += tl.load(bias + j, j < n, 0.0).to(tl.float32)
    tl.store(out + j, y.to(out.dtype.element_ty), j < n)
