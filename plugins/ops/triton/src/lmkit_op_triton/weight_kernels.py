"""What kernels of linears and of experts share: weights of few bits, widened in registers."""

import triton
import triton.language as tl


def _placed(half: str, upper: int, results: int) -> tl.constexpr:
    """PTX that puts four codes under upper bytes, which make them numbers: two in a register, or one.

    A compiler takes three instructions for each code where these are one for a register.
    """
    taken = {"low": "and.b32 t, $R, 0x0F0F0F0F;", "high": "shr.u32 t, $R, 4; and.b32 t, t, 0x0F0F0F0F;"}
    places = {2: ("0x4140", "0x4342"), 4: ("0x7440", "0x7441", "0x7442", "0x7443")}[results]
    made = " ".join(f"prmt.b32 ${i}, t, {upper:#010x}, {place};" for i, place in enumerate(places))
    text = f"{{ .reg .b32 t; {taken.get(half, 'mov.b32 t, $R;')} {made} }}"
    return tl.constexpr(text.replace("$R", f"${results}"))


# Behind 128 in bfloat16, 1024 in float16 and 2 ** 23 in float32 a code of 4 bits stands in the last places of the
# mantissa; behind the latter two one of 8 bits does, too.
LOW_BFLOAT16, HIGH_BFLOAT16 = _placed("low", 0x43434343, 2), _placed("high", 0x43434343, 2)
LOW_FLOAT16, HIGH_FLOAT16 = _placed("low", 0x64646464, 2), _placed("high", 0x64646464, 2)
BYTE_FLOAT16, BYTE_FLOAT32 = _placed("byte", 0x64646464, 2), _placed("byte", 0x4B000000, 4)
LOW_FLOAT32, HIGH_FLOAT32 = _placed("low", 0x4B000000, 4), _placed("high", 0x4B000000, 4)


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
def _code(codes, BITS: tl.constexpr, HIGH: tl.constexpr):
    """Codes of bytes: their halves of 4 bits, or all 8."""
    if BITS == 8:
        found = codes
    elif HIGH:
        found = codes >> 4
    else:
        found = codes & 15
    return found


@triton.jit
def _whole(codes, zero, like, BITS: tl.constexpr, HIGH: tl.constexpr, PTX: tl.constexpr):
    """Codes, bytes or halves of them, less `zero` int32 in the type of `like`, exact.

    A code is put into the mantissa of a power of two: integers are converted at a quarter of the rate of arithmetic.
    """
    if like.dtype == tl.float32:
        y = (_code(codes, BITS, HIGH).to(tl.int32) - zero).to(tl.float32)
    elif like.dtype == tl.bfloat16 and BITS == 4:
        if PTX:
            text: tl.constexpr = HIGH_BFLOAT16 if HIGH else LOW_BFLOAT16
            y = tl.inline_asm_elementwise(text, "=r,=r,r", [codes], tl.bfloat16, True, 4)
        else:
            y = (_code(codes, BITS, HIGH).to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
        y -= (zero + 128).to(tl.float32).to(tl.bfloat16)
    else:
        if PTX:
            placed: tl.constexpr = BYTE_FLOAT16 if BITS == 8 else (HIGH_FLOAT16 if HIGH else LOW_FLOAT16)
            y = tl.inline_asm_elementwise(placed, "=r,=r,r", [codes], tl.float16, True, 4)
        else:
            y = (_code(codes, BITS, HIGH).to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
        y = _narrowed(y - (zero + 1024).to(tl.float32).to(tl.float16), like)
    return y


@triton.jit
def _float4(codes, like):
    """Codes of 4-bit floats (E2M1) as their numbers, exact: exponent and mantissa are put where float16 has them."""
    codes = codes.to(tl.int16)
    half = (((codes & 7) << 9) | ((codes & 8) << 12)).to(tl.float16, bitcast=True)
    return _narrowed(half * 16384.0, like)


@triton.jit
def _of_group(scales, zeros, offsets, zero, first, column, limit, ZEROS: tl.constexpr, OFFSETS: tl.constexpr):
    """Scale, zero and offset of each column [N] in the group whose scales begin at `first`; none from `limit` on."""
    mask, at = column < limit, first + column
    scale, less = tl.load(scales + at, mask, 0.0), tl.zeros_like(column) + zero
    offset = scale
    if ZEROS:
        less = tl.load(zeros + at, mask, 0)
    if OFFSETS:
        offset = tl.load(offsets + at, mask, 0.0)
    return scale, less, offset


@triton.jit
def _weights(codes, less, low, high, like, KIND: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Codes [N, H] of one group less their zeros [N], in the type of `like`; 4-bit floats half as large. KIND: as in
    `weights`."""
    if KIND == 2:
        w = _float4(_code(codes, BITS, HIGH), like)
    elif KIND == 1:
        codes = _code(codes, BITS, HIGH).to(tl.int32)
        looked_up = tl.where(codes > 7, high, low) >> ((codes & 7) * 8).to(tl.int64)
        w = _whole((looked_up.to(tl.int32) & 255).to(tl.uint8), less.to(tl.int32)[:, None], like, 8, False, PTX)
    else:
        w = _whole(codes, less.to(tl.int32)[:, None], like, BITS, HIGH, PTX)
    return w


@triton.jit
def _scaled(y, part, scale, offset, a, KIND: tl.constexpr, OFFSETS: tl.constexpr):
    """y + the products of a group [N, M] with its scale, and its offset for the columns a [M, H]."""
    y += part * (scale.to(tl.float32) * (2.0 if KIND == 2 else 1.0))[:, None]
    if OFFSETS:
        y -= offset.to(tl.float32)[:, None] * tl.sum(a.to(tl.float32), 1)[None, :]
    return y


@triton.jit
def _both(
    y, a, b, codes_at, scale, less, offset, scale_b, less_b, offset_b, low, high, at, column, n,
    OFFSETS: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """y [N, M] and neighbouring columns a, b [M, H] times their codes. Four bits: those of b are the high ones of a's
    bytes. Weights come first: tensor cores take those from registers, where they are widened.

    Without groups and offsets there are no scales in it: `_done`. Those of b are not looked at where a group has both.
    """
    codes = tl.load(codes_at + at // (8 // BITS), (column < n)[:, None], 0)
    others = codes if BITS == 4 else tl.load(codes_at + at + H, (column < n)[:, None], 0)
    v = _weights(codes, less, low, high, a, KIND, BITS, False, PTX)
    if GROUP == 0 and not OFFSETS:
        y = tl.dot(v, tl.trans(a), y, input_precision="ieee")
        w = _weights(others, less, low, high, a, KIND, BITS, BITS == 4, PTX)
        y = tl.dot(w, tl.trans(b), y, input_precision="ieee")
    elif GROUP % (2 * H) == 0 and not OFFSETS:
        part = tl.dot(v, tl.trans(a), input_precision="ieee")
        w = _weights(others, less, low, high, a, KIND, BITS, BITS == 4, PTX)
        part = tl.dot(w, tl.trans(b), part, input_precision="ieee")
        y = _scaled(y, part, scale, offset, a, KIND, False)
    else:
        w = _weights(others, less_b, low, high, a, KIND, BITS, BITS == 4, PTX)
        y = _scaled(y, tl.dot(v, tl.trans(a), input_precision="ieee"), scale, offset, a, KIND, OFFSETS)
        y = _scaled(y, tl.dot(w, tl.trans(b), input_precision="ieee"), scale_b, offset_b, b, KIND, OFFSETS)
    return y


@triton.jit
def _done(y, scale, KIND: tl.constexpr, OFFSETS: tl.constexpr, GROUP: tl.constexpr):
    """What `_both` added up [N, M], as [M, N]."""
    if GROUP == 0 and not OFFSETS:
        y *= (scale.to(tl.float32) * (2.0 if KIND == 2 else 1.0))[:, None]
    return tl.trans(y)
