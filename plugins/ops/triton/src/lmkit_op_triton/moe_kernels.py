"""Kernels of mixtures. Pairs are (token, choice), numbered token * top_k + choice; sorted, they stand by expert.

Rows of an expert are cut into tiles; how many there are is known on the device only. So grids are as large as they can
become, and programs without a tile leave at once: nobody waits, and one graph serves every choice.
"""

import triton
import triton.language as tl

from lmkit_op_triton.kernels import _activated, _gated
from lmkit_op_triton.weight_kernels import _both, _done, _float8, _of_group


@triton.jit
def sort(ids, order, starts, pairs, experts, N: tl.constexpr):
    """ids [pairs] -> order [pairs]: the pairs by expert, `starts` [experts + 1]: where those of each begin in it.

    Program e finds those of expert e. A pair of an expert that is none stands nowhere.
    """
    expert = tl.program_id(0)
    start = tl.zeros([], tl.int32)
    for first in range(0, pairs, N):
        i = first + tl.arange(0, N)
        e = tl.load(ids + i, i < pairs, -1)
        start += tl.sum(((e >= 0) & (e < expert)).to(tl.int32), 0)
    tl.store(starts + expert, start)
    for first in range(0, pairs, N):
        i = first + tl.arange(0, N)
        mine = (tl.load(ids + i, i < pairs, -1) == expert).to(tl.int32)
        tl.store(order + start + tl.cumsum(mine, 0) - mine, i, mine > 0)
        start += tl.sum(mine, 0)
    if expert == experts - 1:
        tl.store(starts + experts, start)


@triton.jit
def _tile(starts, tile, experts, M: tl.constexpr, E: tl.constexpr):
    """The expert of the tile with that number, its first sorted pair, the end of the expert's. No tile: 0 and 0."""
    e = tl.arange(0, E)
    begins = tl.load(starts + e, e < experts, 0)
    ends = tl.load(starts + e + 1, e < experts, 0)
    tiles = (ends - begins + M - 1) // M
    behind = tl.cumsum(tiles, 0)
    expert = tl.sum((behind <= tile).to(tl.int32), 0)
    first = tl.sum(tl.where(e == expert, begins + (tile - behind + tiles) * M, 0), 0)
    return expert, first, tl.sum(tl.where(e == expert, ends, 0), 0)


@triton.jit
def _rows(order, first, end, top_k, FIRST: tl.constexpr, M: tl.constexpr):
    """Which of M rows there are, where each is read, and where its result goes."""
    row = first + tl.arange(0, M)
    valid = row < end
    pair = tl.load(order + row, valid, 0)
    source = pair // top_k if FIRST else row
    target = row if FIRST else pair
    return valid, source.to(tl.int64), target.to(tl.int64)


@triton.jit
def _finish(
    y, z, bias, out, expert, column, target, valid, n,
    FIRST: tl.constexpr, NAME: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Biases, the activation, and the results to where they go. `z` is the second of two parts."""
    if BIAS:
        b_at = bias + expert * PARTS * n + column
        y += tl.load(b_at, column < n, 0.0).to(tl.float32)[None, :]
        if PARTS == 2:
            z += tl.load(b_at + n, column < n, 0.0).to(tl.float32)[None, :]
    if PARTS == 2:
        y = _gated(y, z, NAME)
    elif FIRST:
        y = _activated(y, NAME)
    out_at = out + target[:, None] * n + column[None, :]
    tl.store(out_at, y.to(out.dtype.element_ty), valid[:, None] & (column < n)[None, :])


@triton.jit
def _added(y, a, w_at, scales, at, there, columns, FLOAT8: tl.constexpr, GROUP: tl.constexpr):
    """y + a [M, K] times the weights [K, N] where they are `there`, and times their scales if they have groups."""
    if FLOAT8:
        w = _float8(tl.load(w_at, there, 0), a)
    else:
        w = tl.load(w_at, there, 0.0)
    if GROUP > 0:
        y += tl.dot(a, w, input_precision="ieee") * tl.load(scales + at // GROUP, columns, 0.0)[None, :]
    else:
        y = tl.dot(a, w, y, input_precision="ieee")
    return y


@triton.jit
def multiply(
    x, weight, scales, bias, order, starts, out, top_k, experts, n, k, groups, x_stride,
    FIRST: tl.constexpr, NAME: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
    FLOAT8: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """M rows of one expert times N rows of its weight [PARTS, n, k].

    FLOAT8: its bytes, of which ROWS rows and GROUP columns, or 0: all, share one of the scales [.., groups].

    FIRST: rows of tokens x [T, k] -> the activation NAME of the products, out [pairs, n] as sorted. Else: rows x
    [pairs, k] as sorted -> out [pairs, n] by pair.
    """
    expert, first, end = _tile(starts, tl.program_id(1), experts, M, E)
    if first >= end:
        return
    valid, source, target = _rows(order, first, end, top_k, FIRST, M)
    column = tl.program_id(0) * N + tl.arange(0, N)
    kk = tl.arange(0, K)
    expert = expert.to(tl.int64)
    a_at = x + source[:, None] * x_stride + kk[None, :]
    w_at = weight + (expert * PARTS * n + column[None, :]) * k + kk[:, None]
    of_y = scales + (expert * PARTS * n + column) // ROWS * groups
    of_z = scales + (expert * PARTS * n + n + column) // ROWS * groups
    y = tl.zeros([M, N], tl.float32)
    z = tl.zeros([M, N], tl.float32)
    for at in range(0, k, K):
        left = kk < k - at
        a = tl.load(a_at + at, valid[:, None] & left[None, :], 0.0)
        there = left[:, None] & (column < n)[None, :]
        y = _added(y, a, w_at + at, of_y, at, there, column < n, FLOAT8, GROUP)
        if PARTS == 2:
            z = _added(z, a, w_at + n * k + at, of_z, at, there, column < n, FLOAT8, GROUP)
    if FLOAT8 and GROUP == 0:
        y *= tl.load(of_y, column < n, 0.0)[None, :]
        if PARTS == 2:
            z *= tl.load(of_z, column < n, 0.0)[None, :]
    _finish(y, z, bias, out, expert, column, target, valid, n, FIRST, NAME, PARTS, BIAS)


@triton.jit
def _added_codes(
    y, a, b, w_at, scales, zeros, offsets, zero, low, high, at, column, n, k,
    ZEROS: tl.constexpr, OFFSETS: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    H: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """y [N, M] and neighbouring columns a, b [M, H] times their codes."""
    first, second = 0, 0
    if GROUP > 0:
        first, second = at // GROUP * n, (at + H) // GROUP * n
    s, z, o = _of_group(scales, zeros, offsets, zero, first, column, n, ZEROS, OFFSETS)
    s_b, z_b, o_b = s, z, o
    if GROUP % (2 * H) != 0:
        limit = tl.where(at + H < k, n, 0)
        s_b, z_b, o_b = _of_group(scales, zeros, offsets, zero, second, column, limit, ZEROS, OFFSETS)
    return _both(y, a, b, w_at, s, z, o, s_b, z_b, o_b, low, high, at, column, n, OFFSETS, KIND, BITS, GROUP, H, PTX)


@triton.jit
def multiply_codes(
    x, weight, scales, zeros, offsets, bias, order, starts, out,
    top_k, experts, n, k, width, groups, x_stride, zero, low, high,
    FIRST: tl.constexpr, NAME: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
    ZEROS: tl.constexpr, OFFSETS: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    H: tl.constexpr, M: tl.constexpr, N: tl.constexpr, E: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """`multiply` with weights of integers: codes [PARTS, n, width bytes], scales, zeros and offsets
    [PARTS, groups, n]. A table of 16 bytes is `low` and `high`."""
    expert, first, end = _tile(starts, tl.program_id(1), experts, M, E)
    if first >= end:
        return
    valid, source, target = _rows(order, first, end, top_k, FIRST, M)
    column = tl.program_id(0) * N + tl.arange(0, N)
    kk = tl.arange(0, H)
    expert = expert.to(tl.int64)
    a_at = x + source[:, None] * x_stride + kk[None, :]
    w_at = weight + (expert * PARTS * n + column[:, None]) * width + kk[None, :]
    base = expert * PARTS * groups * n
    up = base + (PARTS - 1) * groups * n
    y = tl.zeros([N, M], tl.float32)
    z = tl.zeros([N, M], tl.float32)
    for at in range(0, k, 2 * H):
        a = tl.load(a_at + at, valid[:, None] & (kk < k - at)[None, :], 0.0)
        b = tl.load(a_at + at + H, valid[:, None] & (kk < k - at - H)[None, :], 0.0)
        y = _added_codes(
            y, a, b, w_at, scales + base, zeros + base, offsets + base, zero, low, high, at, column, n, k,
            ZEROS, OFFSETS, KIND, BITS, GROUP, H, PTX,
        )  # fmt: skip
        if PARTS == 2:
            z = _added_codes(
                z, a, b, w_at + n * width, scales + up, zeros + up, offsets + up, zero, low, high, at, column, n, k,
                ZEROS, OFFSETS, KIND, BITS, GROUP, H, PTX,
            )  # fmt: skip
    y = _done(y, tl.load(scales + base + column, column < n, 0.0), KIND, OFFSETS, GROUP)
    z = _done(z, tl.load(scales + up + column, column < n, 0.0), KIND, OFFSETS, GROUP)
    _finish(y, z, bias, out, expert, column, target, valid, n, FIRST, NAME, PARTS, BIAS)


@triton.jit
def combine(products, ids, weights, out, top_k, experts, size, N: tl.constexpr):
    """products [T * top_k, size], weights [T, top_k] -> their weighted sums [T, size]; -1 adds nothing, another
    expert that is none NaN."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros([N], tl.float32)
    for choice in range(top_k):
        pair = token * top_k + choice
        expert = tl.load(ids + pair)
        known = (expert >= 0) & (expert < experts)
        share = tl.where(expert == -1, 0.0, tl.load(weights + pair).to(tl.float32))
        other = tl.where(expert == -1, 0.0, float("nan"))
        values = tl.load(products + pair * size + i, i < tl.where(known, size, 0), other)
        total += share * values.to(tl.float32)
    tl.store(out + token * size + i, total.to(out.dtype.element_ty), i < size)


@triton.jit
def _first(values, free, where):
    """The first place of the largest of `values` where `free` > 0."""
    key = tl.where(free > 0, values, -float("inf"))
    best = tl.max(tl.max(key, 1), 0)
    at = tl.where((key == best) & (free > 0), where, 0x7FFFFFFF)
    return tl.min(tl.min(at, 1), 0)


@triton.jit
def choose(
    logits, correction, ids, weights, share, stride, epsilon, scale,
    SIGMOID: tl.constexpr, CORRECTED: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TWO: tl.constexpr,
    NORMED: tl.constexpr, TOP_K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One token: logits [experts], as [GROUPS, share] -> its TOP_K experts and their weights. TWO: a group is as good
    as its two best experts."""
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, G)[:, None], tl.arange(0, S)[None, :]
    place = group * share + member
    real = ((group < GROUPS) & (member < share)).to(tl.int32)
    x = tl.load(logits + token * stride + place, real > 0, -float("inf")).to(tl.float32)
    if SIGMOID:
        scores = tl.sigmoid(x)
    else:
        scores = tl.exp(x - tl.max(tl.max(tl.where(x != x, -float("inf"), x), 1), 0))
        scores /= tl.sum(tl.sum(scores, 1), 0)
    wanted = scores
    if CORRECTED:
        wanted += tl.load(correction + place, real > 0, 0.0)
    wanted = tl.where(wanted != wanted, float("inf"), wanted)  # as topk orders them
    if GROUPS > 1:
        inside = tl.where(real > 0, wanted, -float("inf"))
        best = tl.max(inside, 1, keep_dims=True)
        if TWO:
            at = tl.min(tl.where(inside == best, place, 0x7FFFFFFF), 1, keep_dims=True)
            best += tl.max(tl.where(place == at, -float("inf"), inside), 1, keep_dims=True)
        numbers = tl.arange(0, G)[:, None]
        left = (numbers < GROUPS).to(tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            at = _first(best, left, numbers)
            left = tl.where(numbers == at, 0, left)
        wanted = tl.where(left > 0, -float("inf") if TWO else 0.0, wanted)
    chosen, taken, total = tl.zeros([K], tl.int64), tl.zeros([K], tl.float32), 0.0
    choice = tl.arange(0, K)
    for c in tl.static_range(TOP_K):
        at = _first(wanted, real, place)
        real = tl.where(place == at, 0, real)
        weight = tl.sum(tl.sum(tl.where(place == at, scores, 0.0), 1), 0)
        chosen = tl.where(choice == c, at, chosen)
        taken = tl.where(choice == c, weight, taken)
        total += weight
    if NORMED:
        taken = taken / (total + epsilon)
    tl.store(ids + token * TOP_K + choice, chosen, choice < TOP_K)
    tl.store(weights + token * TOP_K + choice, (taken * scale).to(weights.dtype.element_ty), choice < TOP_K)
