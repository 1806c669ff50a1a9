"""Linears of one row, and of a few: a weight is read once, and nothing else takes time. x [m, k], weights [n, k].

One row is multiplied entry by entry, without tensor cores, which would multiply 15 rows of zeros beside it: a program
has N rows of the weight, and its threads add up columns of their own until the end.
"""

import triton
import triton.language as tl

ONE = tl.constexpr(0x3F800000)  # the bits of 1.0


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
def _plane(x, columns, k, bits, BITS: tl.constexpr, SHIFT: tl.constexpr):
    """x times codes, added up for each 16 of them: [N, C, 16] -> [N, C]; and the sums of x alone, [C].

    A code is put into the first places of the mantissa of 1, so that what is multiplied is 1 and a fraction.
    """
    a = tl.load(x + columns, columns < k, 0.0).to(tl.float32)
    v = (((bits << SHIFT) & (((1 << BITS) - 1) << (23 - BITS))) | ONE).to(tl.float32, bitcast=True)
    return tl.sum(v * a[None, :, :], 2), tl.sum(a, 1)


@triton.jit
def _weighed(
    products, sums, group, j, scales, zeros, offsets, zero, n, there, BITS: tl.constexpr, ZEROS: tl.constexpr,
    OFFSETS: tl.constexpr,
):  # fmt: skip
    """Products of 1 and a fraction [N, C] as those of codes less their zeros, with the scales of their groups [C]."""
    at = group[None, :] * n + j[:, None]
    less = tl.load(zeros + at, there, 0).to(tl.float32) if ZEROS else zero * 1.0
    y = (1 << BITS) * (products - sums[None, :]) - less * sums[None, :]
    y *= tl.load(scales + at, there, 0.0).to(tl.float32)
    if OFFSETS:
        y -= sums[None, :] * tl.load(offsets + at, there, 0.0).to(tl.float32)
    return y


@triton.jit
def one_row_of_codes(
    x, weight, scales, zeros, offsets, bias, out, n, k, width, zero, BIAS: tl.constexpr, ZEROS: tl.constexpr,
    OFFSETS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Codes [n, width bytes] of whole numbers, scales, zeros and offsets [groups, n]: x [k] -> out [n].

    C times 16 bytes of a row at a time; those of 4 bits hold H columns in their low halves and the next H in the high.
    """
    j, c, i = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, C), tl.arange(0, 16)
    at = weight + j[:, None, None].to(tl.int64) * width + (c[:, None] * 16 + i[None, :])[None, :, :]
    total = tl.zeros([N, C], tl.float32)
    for start in tl.range(0, width, C * 16, num_stages=STAGES):
        byte = start + c * 16
        there = (j < n)[:, None] & (byte < width)[None, :]
        bits = tl.load(at + start, there[:, :, None], 0).to(tl.int32)
        if BITS == 8:
            column = byte[:, None] + i[None, :]
            there &= (byte < k)[None, :]  # rows of codes are filled up, groups are not
            products, sums = _plane(x, column, k, bits, 8, 15)
            group = byte // GROUP if GROUP > 0 else byte * 0
            total += _weighed(products, sums, group, j, scales, zeros, offsets, zero, n, there, 8, ZEROS, OFFSETS)
        else:
            first = byte // H * (2 * H) + byte % H
            there &= (first < k)[None, :]
            column = first[:, None] + i[None, :]
            products, sums = _plane(x, column, k, bits, 4, 19)
            others, more = _plane(x, column + H, k, bits, 4, 15)
            if GROUP == 0 or GROUP % (2 * H) == 0:
                products += others
                sums += more
            else:
                group = (first + H) // GROUP
                left = there & (first + H < k)[None, :]
                total += _weighed(others, more, group, j, scales, zeros, offsets, zero, n, left, 4, ZEROS, OFFSETS)
            group = first // GROUP if GROUP > 0 else first * 0
            total += _weighed(products, sums, group, j, scales, zeros, offsets, zero, n, there, 4, ZEROS, OFFSETS)
    y = tl.sum(total, 1)
    if BIAS:
        y += tl.load(bias + j, j < n, 0.0).to(tl.float32)
    tl.store(out + j, y.to(out.dtype.element_ty), j < n)
