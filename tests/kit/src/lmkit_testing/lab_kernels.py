"""Small kernels for the tests of the laboratory. Imported by `interpreted` only."""

import triton
import triton.language as tl


@triton.jit
def twice(x, y, n, STRIDE: tl.constexpr, N: tl.constexpr, EXTRA: tl.constexpr, OVERLAP: tl.constexpr):
    """y = 2 x. EXTRA elements too many, programs that overlap by OVERLAP."""
    i = tl.program_id(0) * (N - OVERLAP) + tl.arange(0, N)
    mask = i < n + EXTRA
    tl.store(y + i * STRIDE, tl.load(x + i * STRIDE, mask, 0.0) * 2, mask)


@triton.jit
def cross(x, N: tl.constexpr):
    """Program 1 reads what program 0 writes."""
    i = tl.arange(0, N)
    if tl.program_id(0) == 0:
        tl.store(x + i, tl.zeros([N], tl.float32))
    else:
        tl.store(x + N + i, tl.load(x + i))


@triton.jit
def copy(x, y, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i, i < n), i < n)


@triton.jit
def convert(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty))


@triton.jit
def both(a, b, out, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(a + i), tl.load(b + i)
    if OP == "add":
        z = x + y
    elif OP == "mul":
        z = x * y
    elif OP == "div":
        z = x / y
    elif OP == "max":
        z = tl.maximum(x, y)
    elif OP == "where":
        z = tl.where(x < y, x, y)
    elif OP == "neg":
        z = -x
    elif OP == "float":
        z = (x.to(tl.float32) + y.to(tl.float32)).to(tl.bfloat16)
    elif OP == "half":
        z = tl.abs(x) + x.to(tl.float16).to(tl.bfloat16)
    elif OP == "largest":
        z = tl.zeros([N], tl.bfloat16) + tl.max(x, 0)
    else:
        z = tl.zeros([N], tl.bfloat16) + tl.sum(x, 0)
    tl.store(out + i, z)


@triton.jit
def product(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(x, y))


@triton.jit
def scaled(out, by, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, i * by)


@triton.jit
def _half(x):
    return x / 2


@triton.jit
def halved(x, out, N: tl.constexpr):
    """By a function of its own."""
    i = tl.arange(0, N)
    tl.store(out + i, _half(tl.load(x + i)))
