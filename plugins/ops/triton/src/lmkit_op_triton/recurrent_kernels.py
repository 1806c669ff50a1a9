"""Kernels of linear recurrences. A program takes one row of a step from its first token to its last, with a part of the
state in registers: a decode row and a prompt are the same launch, and no state is read or written twice.

Arithmetic is float32, rounded once. `query_start` says the tokens [first, end) of a row, and `slots` where its state
is: states of a layer are `row_state` entries apart.
"""

import triton
import triton.language as tl


@triton.jit
def conv(
    x, weight, bias, state, slots, query_start, out, rows, channels, x_stride, row_state,
    W: tl.constexpr, BIAS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """C channels of one token: the last W of its row, of which those before the step are in the state."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * C + tl.arange(0, C)
    r = tl.arange(0, R)
    ends = tl.load(query_start + 1 + r, r < rows, 0x7FFFFFFF)
    row = tl.sum((ends <= token).to(tl.int32), 0)
    first, slot = tl.load(query_start + row), tl.load(slots + row)
    y = tl.zeros([C], tl.float32)
    if BIAS:
        y += tl.load(bias + i, i < channels, 0.0).to(tl.float32)
    for j in tl.static_range(W):
        at = token - (W - 1) + j
        here, there = tl.where(at >= first, channels, 0), tl.where(at < first, channels, 0)
        v = tl.load(x + at * x_stride + i, i < here, 0.0).to(tl.float32)
        kept = slot * row_state + (at - first + W - 1) * channels
        v += tl.load(state + kept + i, i < there, 0.0).to(tl.float32)
        y += v * tl.load(weight + i * W + j, i < channels, 0.0).to(tl.float32)
    tl.store(out + token * channels + i, y.to(out.dtype.element_ty), i < channels)


@triton.jit
def conv_state(
    x, state, slots, query_start, channels, x_stride, row_state, W: tl.constexpr, S: tl.constexpr, C: tl.constexpr
):
    """The last W - 1 tokens of a row become its state; S is at least as many."""
    row = tl.program_id(0)
    i = tl.program_id(1) * C + tl.arange(0, C)[None, :]
    j = tl.arange(0, S)[:, None]
    first, end = tl.load(query_start + row).to(tl.int64), tl.load(query_start + row + 1)
    here = state + tl.load(slots + row) * row_state
    live = (j < W - 1) & (i < channels)
    at = end - (W - 1) + j
    new = tl.load(x + at * x_stride + i, live & (at >= first), 0.0).to(tl.float32)
    new += tl.load(here + (at - first + W - 1) * channels + i, live & (at < first), 0.0).to(tl.float32)
    tl.store(here + j * channels + i, new.to(state.dtype.element_ty), live)


@triton.jit
def selective(
    x, dt, a, b, c, skip, state, slots, query_start, out, channels, size, x_stride, dt_stride, b_stride, c_stride,
    row_state, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """D channels, token by token: state = exp(dt a) state + dt x b, y = state c + skip x."""
    row = tl.program_id(0)
    d = tl.program_id(1) * D + tl.arange(0, D)
    n = tl.arange(0, N)
    live = (d < channels)[:, None] & (n < size)[None, :]
    first, end = tl.load(query_start + row).to(tl.int64), tl.load(query_start + row + 1)
    places = d[:, None] * size + n[None, :]
    here = state + tl.load(slots + row) * row_state + places
    h = tl.load(here, live, 0.0)
    rate = tl.load(a + places, live, 0.0)
    through = tl.load(skip + d, d < channels, 0.0)
    for t in range(first, end):
        xs = tl.load(x + t * x_stride + d, d < channels, 0.0)
        step = tl.load(dt + t * dt_stride + d, d < channels, 0.0)
        bs = tl.load(b + t * b_stride + n, n < size, 0.0)
        cs = tl.load(c + t * c_stride + n, n < size, 0.0)
        h = tl.exp(step[:, None] * rate) * h + (step * xs)[:, None] * bs[None, :]
        tl.store(out + t * channels + d, tl.sum(h * cs[None, :], 1) + through * xs, d < channels)
    tl.store(here, h, live)


@triton.jit
def ssd(
    x, dt, a, b, c, skip, state, slots, query_start, out, heads, share, size, width, x_token, x_head, dt_token,
    b_token, b_group, c_token, c_group, row_state, P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The same for P channels of a head, which decay alike; a group of b and c serves `share` heads."""
    row, head = tl.program_id(0), tl.program_id(1)
    p, n = tl.program_id(2) * P + tl.arange(0, P), tl.arange(0, N)
    live = (p < width)[:, None] & (n < size)[None, :]
    first, end = tl.load(query_start + row).to(tl.int64), tl.load(query_start + row + 1)
    here = state + tl.load(slots + row) * row_state + head * width * size + p[:, None] * size + n[None, :]
    h = tl.load(here, live, 0.0)
    rate, through, group = tl.load(a + head), tl.load(skip + head), head // share
    for t in range(first, end):
        xs = tl.load(x + t * x_token + head * x_head + p, p < width, 0.0)
        step = tl.load(dt + t * dt_token + head)
        bs = tl.load(b + t * b_token + group * b_group + n, n < size, 0.0)
        cs = tl.load(c + t * c_token + group * c_group + n, n < size, 0.0)
        h = tl.exp(step * rate) * h + (step * xs)[:, None] * bs[None, :]
        y = tl.sum(h * cs[None, :], 1) + through * xs
        tl.store(out + (t * heads + head) * width + p, y, p < width)
    tl.store(here, h, live)


@triton.jit
def delta(
    q, k, v, decay, beta, state, slots, query_start, out, scale, heads, share, keys, values,
    q_token, q_head, k_token, k_head, v_token, v_head, decay_token, beta_token, row_state,
    K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """V columns of a head's state, token by token: what it holds for the token's key is corrected by the value."""
    row, head = tl.program_id(0), tl.program_id(1)
    j, m = tl.program_id(2) * V + tl.arange(0, V), tl.arange(0, K)
    live = (m < keys)[:, None] & (j < values)[None, :]
    first, end = tl.load(query_start + row).to(tl.int64), tl.load(query_start + row + 1)
    here = state + tl.load(slots + row) * row_state + head * keys * values + m[:, None] * values + j[None, :]
    s = tl.load(here, live, 0.0)
    for t in range(first, end):
        qs = tl.load(q + t * q_token + head // share * q_head + m, m < keys, 0.0).to(tl.float32)
        ks = tl.load(k + t * k_token + head // share * k_head + m, m < keys, 0.0).to(tl.float32)
        vs = tl.load(v + t * v_token + head * v_head + j, j < values, 0.0).to(tl.float32)
        qs *= tl.rsqrt(tl.sum(qs * qs, 0) + 1e-6) * scale
        ks *= tl.rsqrt(tl.sum(ks * ks, 0) + 1e-6)
        s *= tl.exp(tl.load(decay + t * decay_token + head))
        error = vs - tl.sum(s * ks[:, None], 0)
        s += ks[:, None] * (tl.load(beta + t * beta_token + head) * error)[None, :]
        y = tl.sum(s * qs[:, None], 0)
        tl.store(out + (t * heads + head) * values + j, y.to(out.dtype.element_ty), j < values)
    tl.store(here, s, live)
