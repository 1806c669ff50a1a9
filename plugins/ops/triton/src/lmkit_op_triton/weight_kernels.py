"""What kernels of linears and of experts share: weights of few bits, widened in registers."""

import triton
import triton.language as tl


@triton.jit
def _narrowed(half, like):
    """float16 in the type of `like`, by way of float32: GPUs convert to bfloat16 directly at a quarter of the rate."""
    return half.to(tl.float32).to(like.dtype)


@triton.jit
def _float8(bits, like):
    """float8 e4m3 numbers, given as int8, in the type of `like`, divided by 256: exact, but for NaN.

    Sign, exponent and mantissa are put where float16 has them. No GPU needs to know float8 for it.
    """
    half = ((bits.to(tl.int16) << 7) & -0x4001).to(tl.float16, bitcast=True)
    return _narrowed(half, like)


@triton.jit
def _whole(codes, zero, like, BITS: tl.constexpr):
    """Codes uint8 less `zero` int32 in the type of `like`, exact.

    A code is put into the mantissa of a power of two: integers are converted at a quarter of the rate of arithmetic.
    """
    if like.dtype == tl.float32:
        y = (codes.to(tl.int32) - zero).to(tl.float32)
    elif like.dtype == tl.bfloat16 and BITS == 4:
        y = (codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - (zero + 128).to(tl.bfloat16)
    else:
        y = (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - (zero + 1024).to(tl.float16)
        y = _narrowed(y, like)
    return y


@triton.jit
def _float4(codes, like):
    """Codes of 4-bit floats (E2M1) as their numbers, exact: exponent and mantissa are put where float16 has them."""
    codes = codes.to(tl.int16)
    half = (((codes & 7) << 9) | ((codes & 8) << 12)).to(tl.float16, bitcast=True)
    return _narrowed(half * 16384.0, like)


@triton.jit
def _scaled(a, codes, scales, zeros, offsets, zero, low, high, column, limit,
    ZEROS: tl.constexpr, OFFSETS: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """a [M, H] times codes [H, N] of one group: integers are multiplied, the scale is that of the products.

    KIND: as in `weights`. Of columns from `limit` on there are neither scales nor zeros.
    """
    mask = column < limit
    scale = tl.load(scales + column, mask, 0.0).to(tl.float32)
    if KIND == 2:
        w = _float4(codes, a)
        scale *= 2
    else:
        if ZEROS:
            less = tl.load(zeros + column, mask, 0).to(tl.int32)[None, :]
        else:
            less = (tl.zeros_like(column) + zero)[None, :]
        if KIND == 1:
            codes = codes.to(tl.int32)
            looked_up = tl.where(codes > 7, high, low) >> ((codes & 7) * 8).to(tl.int64)
            w = (looked_up.to(tl.int32) & 255).to(tl.uint8)
            w = _whole(w, less, a, 8)
        else:
            w = _whole(codes, less, a, BITS)
    y = tl.dot(a, w, input_precision="ieee") * scale[None, :]
    if OFFSETS:
        y -= tl.sum(a.to(tl.float32), 1)[:, None] * tl.load(offsets + column, mask, 0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def _both(a, b, codes_at, scales, zeros, offsets, zero, low, high, at, column, n, k,
    ZEROS: tl.constexpr, OFFSETS: tl.constexpr, KIND: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """a, b [M, H]: neighbouring columns, times their codes. Four bits: those of b are the high ones of a's bytes."""
    first, second = 0, 0
    if GROUP:
        first, second = at // GROUP * n, (at + H) // GROUP * n
    if BITS == 4:
        codes = tl.load(codes_at + at // 2, (column < n)[None, :], 0)
        others = codes >> 4
        codes &= 15
    else:
        codes = tl.load(codes_at + at, (column < n)[None, :], 0)
        others = tl.load(codes_at + at + H, (column < n)[None, :], 0)
    y = _scaled(
        a, codes, scales + first, zeros + first, offsets + first, zero, low, high, column, n,
        ZEROS, OFFSETS, KIND, BITS,
    )  # fmt: skip
    return y + _scaled(
        b, others, scales + second, zeros + second, offsets + second, zero, low, high, column,
        tl.where(at + H < k, n, 0),
        ZEROS, OFFSETS, KIND, BITS,
    )  # fmt: skip
