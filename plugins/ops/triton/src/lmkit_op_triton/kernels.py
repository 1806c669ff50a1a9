"""The kernels. A program does one row; rows may have any stride, entries of a row are neighbours.

Arithmetic is float32, rounded once. Nothing here is tuned at run time: launch parameters are in `rowops`.
"""

import triton
import triton.language as tl


@triton.jit
def norm(
    x, residual, weight, bias, out, eps, inner, size, x_outer, x_inner, out_outer, out_inner, residual_stride,
    RMS: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """x / rms(x) * weight, or (x - mean) / std * weight + bias. With RESIDUAL: of `residual += x`."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, N)
    mask = i < size
    v = tl.load(x + row // inner * x_outer + row % inner * x_inner + i, mask, 0.0).to(tl.float32)
    if RESIDUAL:
        at = residual + row * residual_stride + i
        total = (tl.load(at, mask, 0.0).to(tl.float32) + v).to(residual.dtype.element_ty)
        tl.store(at, total, mask)
        v = total.to(tl.float32)
    if not RMS:
        v = tl.where(mask, v - tl.sum(v, 0) / size, 0.0)
    y = v * tl.rsqrt(tl.sum(v * v, 0) / size + eps) * tl.load(weight + i, mask, 0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias + i, mask, 0.0).to(tl.float32)
    tl.store(out + row // inner * out_outer + row % inner * out_inner + i, y.to(out.dtype.element_ty), mask)


@triton.jit
def embed(ids, weight, out, size, weight_stride, N: tl.constexpr):
    """A program copies N entries of one row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * N + tl.arange(0, N)
    values = tl.load(weight + tl.load(ids + row) * weight_stride + i, i < size, 0.0)
    tl.store(out + row * size + i, values, i < size)


@triton.jit
def _activated(x, NAME: tl.constexpr):
    """float32 -> float32."""
    if NAME == "silu":
        y = x * tl.sigmoid(x)
    elif NAME == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif NAME == "relu":
        y = tl.maximum(x, 0.0)
    elif NAME == "relu2":
        y = tl.maximum(x, 0.0)
        y = y * y
    else:  # gelu by tanh(z) = 2 sigmoid(2 z) - 1
        z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x * tl.sigmoid(2 * z)
    return y


@triton.jit
def _gated(first, second, NAME: tl.constexpr):
    """Two of float32 -> float32."""
    if NAME == "swiglu_clamped":
        first = tl.minimum(first, 7.0)
        y = first * tl.sigmoid(1.702 * first) * (tl.minimum(tl.maximum(second, -7.0), 7.0) + 1)
    else:
        y = _activated(first, NAME) * second
    return y


@triton.jit
def activate(x, out, size, x_stride, NAME: tl.constexpr, N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * N + tl.arange(0, N)
    v = tl.load(x + row * x_stride + i, i < size, 0.0).to(tl.float32)
    tl.store(out + row * size + i, _activated(v, NAME).to(out.dtype.element_ty), i < size)


@triton.jit
def gate(x, out, size, x_stride, NAME: tl.constexpr, N: tl.constexpr):
    """activation(first half) * second half; `size` is that of a half."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * N + tl.arange(0, N)
    first = tl.load(x + row * x_stride + i, i < size, 0.0).to(tl.float32)
    second = tl.load(x + row * x_stride + size + i, i < size, 0.0).to(tl.float32)
    y = _gated(first, second, NAME)
    tl.store(out + row * size + i, y.to(out.dtype.element_ty), i < size)


@triton.jit
def add(
    x, y, h, gate, size, h_size, x_stride, y_stride, h_stride, GATE: tl.constexpr, N: tl.constexpr, H: tl.constexpr
):
    """x += y, or x += y * sigmoid(h . gate)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, N)
    v = tl.load(y + row * y_stride + i, i < size, 0.0).to(tl.float32)
    if GATE:
        j = tl.arange(0, H)
        a = tl.load(h + row * h_stride + j, j < h_size, 0.0).to(tl.float32)
        v *= tl.sigmoid(tl.sum(a * tl.load(gate + j, j < h_size, 0.0).to(tl.float32), 0))
    at = x + row * x_stride + i
    v += tl.load(at, i < size, 0.0).to(tl.float32)
    tl.store(at, v.to(x.dtype.element_ty), i < size)


@triton.jit
def angles(positions, inv_freq, cos, sin, magnitude, pairs, P: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, P)
    angle = tl.load(positions + row).to(tl.float32) * tl.load(inv_freq + i, i < pairs, 0.0)
    tl.store(cos + row * pairs + i, tl.cos(angle) * magnitude, i < pairs)
    tl.store(sin + row * pairs + i, tl.sin(angle) * magnitude, i < pairs)


@triton.jit
def rotate(
    x, cos, sin, heads, pairs, x_token, x_head, INTERLEAVED: tl.constexpr, H: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    """A program turns H heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * H + tl.arange(0, H)
    i = tl.arange(0, P)
    mask = (head < heads)[:, None] & (i < pairs)[None, :]
    c = tl.load(cos + token * pairs + i, i < pairs, 0.0)[None, :]
    s = tl.load(sin + token * pairs + i, i < pairs, 0.0)[None, :]
    base = x + token * x_token + head[:, None] * x_head
    if INTERLEAVED:
        left, right = base + 2 * i[None, :], base + 2 * i[None, :] + 1
    else:
        left, right = base + i[None, :], base + pairs + i[None, :]
    a = tl.load(left, mask, 0.0).to(tl.float32)
    b = tl.load(right, mask, 0.0).to(tl.float32)
    tl.store(left, (a * c - b * s).to(x.dtype.element_ty), mask)
    tl.store(right, (b * c + a * s).to(x.dtype.element_ty), mask)


@triton.jit
def mask(x, rows, bits, size, num_bytes, stride, ROWS: tl.constexpr, N: tl.constexpr):
    """Those of N tokens of a row become -inf whose bit is 0; the others are not touched."""
    mine = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + mine) if ROWS else mine
    i = tl.program_id(1) * N + tl.arange(0, N)
    byte = tl.load(bits + mine * num_bytes + i // 8, i // 8 < num_bytes, 0).to(tl.int32)
    limit = tl.where((byte >> (i % 8)) % 2 == 0, size, 0)
    tl.store(x + row * stride + i, -float("inf"), i < limit)


@triton.jit
def block_max(x, most, where, size, stride, N: tl.constexpr):
    """The maximum of N entries of a row, where it stands first; NaN is the largest."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = block * N + tl.arange(0, N)
    v = tl.load(x + row * stride + i, i < size, -float("inf")).to(tl.float32)
    key = tl.where(v != v, float("inf"), v)
    largest = tl.max(key, 0)
    at = row * tl.num_programs(1) + block
    nan = tl.max((v != v).to(tl.int32), 0) > 0
    tl.store(most + at, tl.where(nan, float("nan"), largest))
    tl.store(where + at, tl.min(tl.where((key == largest) & (i < size), i, 0x7FFFFFFF), 0))


@triton.jit
def row_max(most, where, ids, largest, blocks, N: tl.constexpr):
    """The first of the largest blocks."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, N)
    v = tl.load(most + row * blocks + i, i < blocks, -float("inf"))
    key = tl.where(v != v, float("inf"), v)
    best = tl.max(key, 0)
    at = tl.load(where + row * blocks + i, i < blocks, 0x7FFFFFFF)
    nan = tl.max((v != v).to(tl.int32), 0) > 0
    tl.store(ids + row, tl.min(tl.where((key == best) & (i < blocks), at, 0x7FFFFFFF), 0).to(tl.int64))
    tl.store(largest + row, tl.where(nan, float("nan"), best).to(largest.dtype.element_ty))


@triton.jit
def _at_least(x, size, least, bits, COUNT: tl.constexpr, N: tl.constexpr):
    """How many entries [size] are at least the float with these `bits`, or their sum; those below `least` are gone."""
    total = tl.zeros([], tl.float64)
    for start in range(0, size, N):
        i = start + tl.arange(0, N)
        w = tl.load(x + i, i < size, 0.0)
        kept = (i < size) & (w.to(tl.int32, bitcast=True) >= bits) & (w >= least)
        if COUNT:
            total += tl.sum(kept.to(tl.int32), 0).to(tl.float64)
        else:
            total += tl.sum(tl.where(kept, w, 0.0).to(tl.float64), 0)
    return total


@triton.jit
def _threshold(x, size, least, wanted, COUNT: tl.constexpr, N: tl.constexpr):
    """The largest weight such that the entries from it on are `wanted` many, or weigh that much.

    Bits of floats from 0 to 1 order like the floats, so the answer is found bit by bit, from the highest of 30.
    """
    found = tl.zeros([], tl.int32)
    for step in range(30):
        bits = found + (1 << (29 - step))
        if _at_least(x, size, least, bits, COUNT, N) >= wanted:
            found = bits
    return found.to(tl.float32, bitcast=True)


@triton.jit
def draw(x, drawn, ids, largest, rows, size, stride, N: tl.constexpr):
    """One row of logits, which become weights in place.

    `drawn` [5, rows] float64: temperature times ln 2, min_p, top_k, top_p, share.
    """
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    scale = tl.load(drawn + row).to(tl.float32)
    min_p = tl.load(drawn + rows + row).to(tl.float32)
    top_k = tl.load(drawn + 2 * rows + row)
    top_p = tl.load(drawn + 3 * rows + row)
    share = tl.load(drawn + 4 * rows + row)

    best, nan = -float("inf"), 0
    for start in range(0, size, N):
        i = start + tl.arange(0, N)
        v = tl.load(x + i, i < size, -float("inf"))
        best = tl.maximum(best, tl.max(tl.where(v != v, -float("inf"), v), 0))
        nan = tl.maximum(nan, tl.max((v != v).to(tl.int32), 0))
    sound = (nan == 0) & (best > -float("inf")) & (best < float("inf"))
    tl.store(largest + row, tl.where(nan > 0, float("nan"), best))

    for start in range(0, size, N):
        i = start + tl.arange(0, N)
        w = tl.exp2((tl.load(x + i, i < size, -float("inf")) - best) / scale)
        w = tl.where(sound, w, 1.0)
        tl.store(x + i, tl.where(w >= min_p, w, 0.0), i < size)

    least = 0.0
    if top_k > 0:
        least = _threshold(x, size, least, top_k, True, N)
    if top_p < 1:
        least = _threshold(x, size, least, top_p * _at_least(x, size, least, 0, False, N), False, N)

    target = share * _at_least(x, size, least, 0, False, N)
    before, token, last = tl.zeros([], tl.float64), -1, 0
    for start in range(0, size, N):
        i = start + tl.arange(0, N)
        w = tl.load(x + i, i < size, 0.0)
        kept = tl.where((w >= least) & (w > 0), w, 0.0).to(tl.float64)
        last = tl.maximum(last, tl.max(tl.where(kept > 0, i, 0), 0))
        total = before + tl.sum(kept, 0)
        if (token < 0) & (total > target):
            ends = before + tl.cumsum(kept, 0)
            token = tl.min(tl.where((ends > target) & (kept > 0), i, 0x7FFFFFFF), 0)
            token = tl.where(token == 0x7FFFFFFF, last, token)
        before = total
    # Rounding may put the target behind the last weight; then it is the last one.
    tl.store(ids + row, tl.where(token < 0, last, token).to(tl.int64))
