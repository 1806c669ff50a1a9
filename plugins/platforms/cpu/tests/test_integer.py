"""Integer linears: both widths, groups and zero points, on every instruction set, against float64."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
import torch
from lmkit.api import Integers
from lmkit_platform_cpu.integer import LARGEST, PackedIntegers, linear, pack, round_and_pack
from lmkit_platform_cpu.native import Native, load
from lmkit_testing import PluginConformance
from torch import Tensor

LIBRARY = load()
needs_library = pytest.mark.skipif(LIBRARY is None, reason="the native library is not built here")
ISAS = LIBRARY.isas if LIBRARY is not None else ()
OTHERS = [pytest.param(isa, marks=pytest.mark.full("lmkit-platform-cpu")) for isa in ISAS[:-1]]
SHAPES = [(1, 1), (33, 7), (64, 64), (100, 129), (5, 0), (70, 1301)]
ROWS = (0, 1, 2, 7, 13, 65) + ((64, 131) if os.environ.get("KERNEL_GRID") else ())


class TestLinear(PluginConformance):
    plugin = "op:linear_integer_native"


@pytest.fixture
def native() -> Iterator[Native]:
    assert LIBRARY is not None
    before = LIBRARY.threads
    yield LIBRARY
    LIBRARY.set_isa("auto")
    LIBRARY.start(before)


def random_integers(n: int, k: int, bits: int, group: int, origin: str) -> tuple[Integers, Tensor]:
    """Codes with scales of very different sizes, and the weight they stand for in float64.

    `origin`: a zero for each group ("zeros"), an offset ("offsets"), or the same zero for all (""); "table": likewise,
    and codes of 4 bits stand for others.
    """
    noise = torch.Generator().manual_seed(n + k + bits + group)
    groups = -(-k // (group or max(k, 1)))
    codes = torch.randint(0, 1 << bits, (n, k), generator=noise, dtype=torch.uint8)
    scales = (
        torch.rand(n, groups, generator=noise) * torch.tensor([1e-3, 1.0])[: max(1, min(2, n))].repeat(n)[:n, None]
        + 1e-4
    ).half()
    zero = torch.randint(0, 1 << bits, (n, groups), generator=noise, dtype=torch.uint8)
    table = (
        torch.randint(0, 256, (16,), generator=noise, dtype=torch.uint8) if origin == "table" and bits == 4 else None
    )
    zero = zero if origin == "zeros" else 0 if origin == "offsets" else 128 if table is not None else 1 << (bits - 1)
    offsets = (scales * (torch.rand(n, groups, generator=noise) * (1 << bits))).half() if origin == "offsets" else None
    wide = lambda t: t.double().repeat_interleave(group or max(k, 1), 1)[:, :k]  # noqa: E731
    meant = codes if table is None else table[codes.long()]
    weight = (meant.double() - (wide(zero) if isinstance(zero, Tensor) else zero)) * wide(scales)
    if offsets is not None:
        weight -= wide(offsets)
    return Integers(codes, scales.float(), zero, offsets=offsets, table=table), weight


@needs_library
@pytest.mark.parametrize("isa", [*OTHERS, *ISAS[-1:]])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("group", "origin", "planes"),
    [
        (0, "", 2), (32, "zeros", 2), (128, "", 2), (64, "zeros", 1), (0, "", 1),
        (32, "offsets", 1), (16, "offsets", 2), (16, "", 1), (32, "table", 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.one_in(4)
def test_equals_the_product_in_float64(
    native: Native, isa: str, bits: int, group: int, origin: str, planes: int, dtype: torch.dtype
) -> None:
    """The error is that of rounding activations; a row does not depend on its neighbours nor on threads."""
    native.set_isa(isa)
    for n, k in SHAPES:
        integers, weight = random_integers(n, k, bits, group, origin)
        native.start(3)
        packed = pack(native, integers, bits, group, planes)
        bias = torch.randn(n, generator=torch.Generator().manual_seed(1)).to(dtype)
        for rows, with_bias in itertools.product(ROWS, (True, False)):
            wide = torch.full((rows, k + 3), torch.nan, dtype=dtype)
            x = wide[:, :k]
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(rows)))
            added = bias if with_bias else None
            got = linear(native, x, packed, added)
            expected = x.double() @ weight.T + (bias.double() if with_bias else 0)
            # half a step of x in each column, a rounding of the result
            step = (x.double().abs().amax(1, keepdim=True) if k else 0) / (LARGEST if planes == 2 else 127)
            unit = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
            bound = step * 0.51 * weight.abs().sum(1) + unit * (x.double().abs() @ weight.abs().T + 1)
            assert ((got.double() - expected).abs() <= bound).all(), f"{n} x {k}, {rows} rows"
            for row in {0, rows // 2, rows - 1} if rows else ():
                assert torch.equal(linear(native, x[row : row + 1], packed, added)[0], got[row])
            native.start(1)
            assert torch.equal(linear(native, x, packed, added), got)
            native.start(3)


@needs_library
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
def test_all_instruction_sets_agree(native: Native, isa: str, planes: int, bits: int) -> None:
    """The products are exact: only the order of the few sums of blocks could differ, and it does not."""
    integers, _ = random_integers(70, 300, bits, 64, "zeros")
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    native.set_isa(ISAS[-1])
    expected = linear(native, x, pack(native, integers, bits, 64, planes))
    native.set_isa(isa)
    got = linear(native, x, pack(native, integers, bits, 64, planes))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-5)


@needs_library
@pytest.mark.skipif(not {"amx", "avx512_bf16"} <= set(ISAS), reason="needs tile registers, and vectors to compare")
@pytest.mark.parametrize(
    ("bits", "group", "origin", "planes"),
    [
        (4, 64, "zeros", 1), (4, 128, "", 1), (4, 0, "", 2), (4, 128, "table", 2), (8, 0, "", 2), (8, 64, "", 1),
        (4, 32, "offsets", 1), (4, 32, "offsets", 2), (8, 32, "", 2),
    ],
)  # fmt: skip
def test_many_rows_are_those_of_vectors(native: Native, bits: int, group: int, origin: str, planes: int) -> None:
    """Where panels are unpacked for all rows of a chunk: the very bits, with one cut of the columns and several."""
    for n, k in ((33, 256), (70, 1920)):
        packed = pack(native, random_integers(n, k, bits, group, origin)[0], bits, group, planes)
        x = torch.randn(300, k, generator=torch.Generator().manual_seed(k)).bfloat16()
        x[5, 7], x[290] = torch.nan, 0
        native.set_isa("avx512_bf16")
        expected = linear(native, x, packed)
        native.set_isa("amx")
        assert packed.tiled
        for rows in (17, 33, 64, 131, 300):
            assert torch.equal(linear(native, x[:rows], packed).nan_to_num(7), expected[:rows].nan_to_num(7)), rows


@needs_library
@pytest.mark.parametrize("isa", ISAS)
def test_largest_values_do_not_overflow(native: Native, isa: str) -> None:
    native.set_isa(isa)
    for planes, k in ((2, 128), (2, 1024), (1, 60_000), (1, 70_000)):
        integers = Integers(torch.full((3, k), 255, dtype=torch.uint8), torch.ones(3, 1), 0)
        packed = pack(native, integers, 8, 0, planes)
        got = linear(native, torch.full((1, k), -2.0), packed)
        assert torch.allclose(got, torch.tensor(-2.0 * 255 * k), rtol=1e-5), (planes, k)
    packed = pack(native, Integers(torch.full((3, 1024), 15, dtype=torch.uint8), torch.ones(3, 1), 0), 4, 0, 2)
    for low in (-128.0, 127.0):  # the low byte of all but the greatest value of each block of columns
        x = torch.full((1, 1024), low)
        x[:, ::128] = LARGEST
        assert torch.allclose(linear(native, x, packed), 15 * x.sum(), rtol=1e-5), low


@needs_library
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows(native: Native, isa: str, planes: int, bad: float) -> None:
    """In its own row only; zeros and tiny values give zero."""
    native.set_isa(isa)
    integers, _ = random_integers(40, 200, 4, 64, "zeros")
    x = torch.zeros(4, 200)
    x[0, 150], x[2] = bad, 1e-38
    got = linear(native, x, pack(native, integers, 4, 64, planes))
    assert got[0].isnan().all()
    assert not got[1:].any()


@needs_library
def test_what_does_not_fit_is_refused(native: Native) -> None:
    packed: PackedIntegers = pack(native, random_integers(8, 64, 8, 0, "")[0], 8, 0, 2)
    with pytest.raises(ValueError, match="linear of 64 values"):
        linear(native, torch.randn(2, 63), packed)
    with pytest.raises(ValueError, match="float64"):
        linear(native, torch.randn(2, 64).double(), packed)
    with pytest.raises(ValueError, match="bias of 8"):
        linear(native, torch.randn(2, 64), packed, torch.randn(8).half())


@needs_library
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("bits", "group", "rounding"), [(8, 0, "symmetric"), (8, 32, "symmetric"), (4, 64, "symmetric"), (4, 32, "range")]
)
def test_rounding_follows_the_rules(
    native: Native, isa: str, dtype: torch.dtype, bits: int, group: int, rounding: str
) -> None:
    """Bit for bit what the rules say, packed; rows of zeros, of one sign and of one large value included."""
    native.set_isa(isa)
    weight = torch.randn(70, 333, generator=torch.Generator().manual_seed(bits))
    weight[3], weight[4], weight[5, 7] = 0, weight[4].abs() + 5, 1000
    weight = weight.to(dtype)
    k = weight.shape[1]
    width = group or k
    padded = torch.nn.functional.pad(weight.float(), (0, -k % width)).unflatten(1, (-1, width))
    low, high = padded.amin(-1).clamp(max=0), padded.amax(-1).clamp(min=0)
    divisor = 127 if bits == 8 else 7.5
    scales = ((high - low) / 15 if rounding == "range" else padded.abs().amax(-1) / divisor).half().float()
    steps = torch.where(scales > 0, scales.reciprocal(), 0)
    zeros = (-low * steps).round().clamp(0, 15) if rounding == "range" else torch.full_like(scales, 1 << (bits - 1))
    codes = (padded * steps[..., None] + zeros[..., None]).round()
    codes = codes.clamp(1, 255) if bits == 8 else codes.clamp(0, 15)
    given = zeros.to(torch.uint8) if rounding == "range" else 1 << (bits - 1)
    expected = pack(native, Integers(codes.flatten(1)[:, :k].to(torch.uint8), scales, given), bits, group, 2)
    got = round_and_pack(native, weight, bits, group, 2, rounding)
    assert torch.equal(got.data, expected.data)
    assert torch.equal(got.scales, expected.scales)
    assert (got.zeros is None) == (expected.zeros is None)
    assert got.zeros is None or torch.equal(got.zeros, expected.zeros)
    assert got.zero == expected.zero
