"""Kernels of linears whose weights have few bits. x [m, k], weights [n, k] -> out [m, n].

Where few programs would run, columns are cut into SPLITS parts, whose float32 products [SPLITS, m, n] `merge` adds up
in their order. Activations that a checkpoint wants rounded are so in a launch of their own.
"""

import triton
import triton.language as tl

from lmkit_op_triton.weight_kernels import _both, _done, _float8, _of_group


@triton.jit
def _place(m, M: tl.constexpr, N: tl.constexpr):
    """The program's rows of x, which of them there are, and its rows of the weight."""
    row = tl.program_id(1) * M + tl.arange(0, M)
    return row.to(tl.int64), row < m, tl.program_id(0) * N + tl.arange(0, N)


@triton.jit
def _store(y, bias, out, row, valid, column, m, n, BIAS: tl.constexpr, SPLITS: tl.constexpr):
    """Products with their biases, or those of a part as they are."""
    if SPLITS == 1:
        if BIAS:
            y += tl.load(bias + column, column < n, 0.0).to(tl.float32)[None, :]
    else:
        out += tl.program_id(2).to(tl.int64) * m * n
    there = valid[:, None] & (column < n)[None, :]
    tl.store(out + row[:, None] * n + column[None, :], y.to(out.dtype.element_ty), there)


@triton.jit
def multiply_codes(
    x, weight, scales, zeros, offsets, bias, out, m, n, k, width, x_stride, each, zero, low, high,
    BIAS: tl.constexpr, ZEROS: tl.constexpr, OFFSETS: tl.constexpr, KIND: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, SPLITS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Codes [n, width bytes], scales, zeros and offsets [groups, n]; a table of 16 bytes is `low` and `high`.

    A part has `each` columns, a multiple of 2 H. What the next columns' groups have is read while these are multiplied.
    """
    row, valid, column = _place(m, M, N)
    kk = tl.arange(0, H)
    a_at = x + row[:, None] * x_stride + kk[None, :]
    w_at = weight + column[:, None].to(tl.int64) * width + kk[None, :]
    start = tl.program_id(2) * each
    first, second = 0, 0
    if GROUP > 0:
        first, second = start // GROUP * n, (start + H) // GROUP * n
    limit = tl.where(start < k, n, 0)
    scale, less, offset = _of_group(scales, zeros, offsets, zero, first, column, limit, ZEROS, OFFSETS)
    scale_b, less_b, offset_b = scale, less, offset
    if GROUP % (2 * H) != 0:
        limit = tl.where(start + H < k, n, 0)
        scale_b, less_b, offset_b = _of_group(scales, zeros, offsets, zero, second, column, limit, ZEROS, OFFSETS)
    y = tl.zeros([N, M], tl.float32)
    for at in range(start, tl.minimum(start + each, k), 2 * H):
        s, z, o, s_b, z_b, o_b = scale, less, offset, scale_b, less_b, offset_b
        if GROUP > 0:
            limit = tl.where(at + 2 * H < k, n, 0)
            first = (at + 2 * H) // GROUP * n
            scale, less, offset = _of_group(scales, zeros, offsets, zero, first, column, limit, ZEROS, OFFSETS)
        if GROUP % (2 * H) != 0:
            limit = tl.where(at + 3 * H < k, n, 0)
            second = (at + 3 * H) // GROUP * n
            scale_b, less_b, offset_b = _of_group(scales, zeros, offsets, zero, second, column, limit, ZEROS, OFFSETS)
        a = tl.load(a_at + at, valid[:, None] & (kk < k - at)[None, :], 0.0)
        b = tl.load(a_at + at + H, valid[:, None] & (kk < k - at - H)[None, :], 0.0)
        y = _both(
            y, a, b, w_at, s, z, o, s_b, z_b, o_b, low, high, at, column, n, OFFSETS, KIND, BITS, GROUP, H, PTX
        )  # fmt: skip
    _store(_done(y, scale, KIND, OFFSETS, GROUP), bias, out, row, valid, column, m, n, BIAS, SPLITS)


@triton.jit
def multiply_wide(
    x, weight, scales, bias, out, m, n, k, groups, x_stride, each,
    BIAS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Weights float8 in the bytes of int8, widened for x, which is of a wider type. As in `multiply_bytes`, but for
    x, which comes first: this was the faster way."""
    row, valid, column = _place(m, M, N)
    kk = tl.arange(0, K)
    a_at = x + row[:, None] * x_stride + kk[None, :]
    w_at = weight + column[None, :].to(tl.int64) * k + kk[:, None]
    columns = column < n
    s_at = scales + column // ROWS * groups
    start = tl.program_id(2) * each
    y = tl.zeros([M, N], tl.float32)
    for at in range(start, tl.minimum(start + each, k), K):
        left = kk < k - at
        w = tl.load(w_at + at, left[:, None] & columns[None, :], 0)
        a = tl.load(a_at + at, valid[:, None] & left[None, :], 0.0)
        part = tl.dot(a, _float8(w, a), input_precision="ieee")
        if GROUP > 0:
            part *= tl.load(s_at + at // GROUP, columns, 0.0)[None, :]
        y += part
    if GROUP == 0:
        y *= tl.load(s_at, columns, 0.0)[None, :]
    _store(y, bias, out, row, valid, column, m, n, BIAS, SPLITS)


@triton.jit
def multiply_bytes(
    x, weight, scales, x_scales, x_sums, zeros, bias, out, m, n, k, groups, x_groups, x_stride, each,
    BIAS: tl.constexpr, ZEROS: tl.constexpr, INTEGERS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    SPLITS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Weights int8, or float8 in the bytes of one, of which ROWS rows and GROUP columns (0: all) share a scale.

    INTEGERS: x is int8, too, and the weights less their zeros [n]; else x is float8. Each row of x has a scale, or each
    GROUP of its columns if `x_groups` > 1. A part has `each` columns, a multiple of K. Weights come first: they fill
    the 64 rows of a product, which a few rows of x do not.
    """
    row, valid, column = _place(m, M, N)
    kk = tl.arange(0, K)
    a_at = x + row[:, None] * x_stride + kk[None, :]
    w_at = weight + column[:, None].to(tl.int64) * k + kk[None, :]
    columns = column < n
    s_at = scales + column // ROWS * groups
    start = tl.program_id(2) * each
    y = tl.zeros([N, M], tl.int32 if INTEGERS else tl.float32)
    for at in range(start, tl.minimum(start + each, k), K):
        left = kk < k - at
        w = tl.load(w_at + at, columns[:, None] & left[None, :], 0)
        if INTEGERS:
            a = tl.load(a_at + at, valid[:, None] & left[None, :], 0)
            y = tl.dot(w, tl.trans(a), y, out_dtype=tl.int32)
        else:
            a = tl.load(a_at + at, valid[:, None] & left[None, :], 0.0)
            part = tl.dot(w.to(tl.float8e4nv, bitcast=True), tl.trans(a))
            if GROUP > 0:
                part *= tl.load(s_at + at // GROUP, columns, 0.0)[:, None]
                part *= tl.load(x_scales + row * x_groups + at // GROUP, valid, 0.0)[None, :]
            y += part
    if INTEGERS:
        if ZEROS:
            first = valid & (row < tl.where(start == 0, m, 0))
            sums = tl.load(x_sums + row, first, 0)
            y -= sums[None, :] * tl.load(zeros + column, columns, 0).to(tl.int32)[:, None]
        y = y.to(tl.float32)
    if GROUP == 0:
        y *= tl.load(s_at, columns, 0.0)[:, None]
        y *= tl.load(x_scales + row, valid, 0.0)[None, :]
    _store(tl.trans(y), bias, out, row, valid, column, m, n, BIAS, SPLITS)


@triton.jit
def merge(parts, bias, out, size, n, BIAS: tl.constexpr, SPLITS: tl.constexpr, N: tl.constexpr):
    """parts [SPLITS, size] float32 -> their sums, out [size], rows of n."""
    i = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    total = tl.zeros([N], tl.float32)
    for split in range(SPLITS):
        total += tl.load(parts + split * size.to(tl.int64) + i, i < size, 0.0)
    if BIAS:
        total += tl.load(bias + i % n, i < size, 0.0).to(tl.float32)
    tl.store(out + i, total.to(out.dtype.element_ty), i < size)


@triton.jit
def _largest(x, k, N: tl.constexpr):
    """The largest magnitude of a row."""
    largest = 0.0
    for first in range(0, k, N):
        i = first + tl.arange(0, N)
        largest = tl.maximum(largest, tl.max(tl.abs(tl.load(x + i, i < k, 0.0).to(tl.float32)), 0))
    return largest


@triton.jit
def round_integers(x, codes, scales, sums, k, x_stride, N: tl.constexpr):
    """A row of x [m, k] as codes int8 and their scale, the largest magnitude / 127; `sums` of the codes, int32."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    largest = _largest(x, k, N)
    inverse = tl.where(largest > 0, 127.0 / largest, 0.0)
    total = tl.zeros([], tl.int32)
    for first in range(0, k, N):
        i = first + tl.arange(0, N)
        value = tl.load(x + i, i < k, 0.0).to(tl.float32) * inverse
        # What is added makes the last bit of a float32 a whole number: it rounds to nearest, halves to even.
        value = tl.minimum(tl.maximum((value + 12582912.0) - 12582912.0, -127.0), 127.0)
        code = value.to(tl.int32)
        total += tl.sum(code, 0)
        tl.store(codes + row * k + i, code.to(tl.int8), i < k)
    tl.store(scales + row, largest / 127.0)
    tl.store(sums + row, total)


@triton.jit
def round_floats(
    x, codes, scales, stored, k, groups, x_stride, STORED: tl.constexpr, GROUP: tl.constexpr, POWERS: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """GROUP columns of a row of x [m, k], or (0) all, as float8 codes and their scale [m, groups].

    Their largest magnitude is 448 of it, or of the power of two above if POWERS; STORED: the scale is that number.
    """
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, end = group * GROUP, k
    if GROUP > 0:
        end = tl.minimum(first + GROUP, k)
    x += row * x_stride
    if STORED:
        scale = stored
    else:
        scale = tl.maximum(_largest(x + first, end - first, N) / 448.0, 1.1754943508222875e-38)
        if POWERS:
            bits = scale.to(tl.int32, bitcast=True)
            scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    for at in range(first, end, N):
        i = at + tl.arange(0, N)
        value = tl.div_rn(tl.load(x + i, i < end, 0.0).to(tl.float32), scale + tl.zeros([N], tl.float32))
        value = tl.minimum(tl.maximum(value, -448.0), 448.0)
        tl.store(codes + row * k + i, value.to(codes.dtype.element_ty), i < end)
    tl.store(scales + row * groups + group, scale)
