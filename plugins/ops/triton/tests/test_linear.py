"""Linears of few bits in the laboratory: the reference's values, in bounds, no races, all written, few bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit.api import DeviceInfo, Integers, LinearSpec
from lmkit_layers.linear import PLAIN, PlainFormat
from lmkit_layouts import Fp8Format, MxFp4, Rounding
from lmkit_op_triton import linear, tiles, weight_kernels
from lmkit_op_triton.linear import FLOATS, INTEGERS, WIDE, RoundedInputs, TritonFloat8Linear, TritonLinear, splits_of
from lmkit_op_triton.weights import BYTES, FLOAT4, WHOLE, StackedCodes
from lmkit_testing import PluginConformance
from lmkit_testing.triton_lab import Seen, lab, mutant
from torch import Tensor

CODES, FLOAT8 = TritonLinear(), TritonFloat8Linear()
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the largest value
EXACT, EIGHT_BITS = 1.0, 4.0  # times that, where activations are rounded as well: the reference rounds them, too
GPU = DeviceInfo("cuda", "gpu", capability=(9, 0))
WRITTEN = ("out", "codes", "sums")
SHAPES = ((72, 300), (33, 64), (1, 17), (96, 16))  # rows and columns of weights


class TestLinear(PluginConformance):
    plugin = "op:linear_triton"


class TestFloat8Linear(PluginConformance):
    plugin = "op:fp8_triton"


@dataclass(frozen=True)
class Few(PlainFormat):
    """Integers at random, as formats give them."""

    bits: int
    group: int = 0
    zeros: bool = False
    offsets: bool = False
    table: bool = False
    ordered: bool = False
    activations: str = "float"
    rounding: str = ""
    name: str = "few"

    def integers(self, params: Mapping[str, Tensor]) -> Integers:
        (n, k), noise = params["weight"].shape, torch.Generator().manual_seed(1)
        groups = -(-k // (self.group or k))
        codes = torch.randint(0, 1 << self.bits, (n, k), generator=noise, dtype=torch.uint8)
        scales = (torch.rand(n, groups, generator=noise) + 0.5).half().float() / 16
        zeros: Tensor | int = 1 << (self.bits - 1)
        if self.zeros:
            zeros = torch.randint(0, 1 << self.bits, (n, groups), generator=noise, dtype=torch.uint8)
        offsets = torch.randn(n, groups, generator=noise).half().float() if self.offsets else None
        table = torch.randint(0, 255, (16,), generator=noise, dtype=torch.uint8) if self.table else None
        order = torch.randperm(k, generator=noise) if self.ordered else None
        return Integers(codes, scales, zeros, order, offsets, table)

    def dequantize(self, params: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        found = self.integers(params)
        (_, k), span = found.codes.shape, self.group or found.codes.shape[1]
        codes = found.codes if found.table is None else found.table[found.codes.long()]
        zeros = found.zeros.repeat_interleave(span, 1)[:, :k] if isinstance(found.zeros, Tensor) else found.zeros
        weight = (codes.double() - zeros) * found.scales.double().repeat_interleave(span, 1)[:, :k]
        if found.offsets is not None:
            weight -= found.offsets.double().repeat_interleave(span, 1)[:, :k]
        if found.order is not None:
            placed = torch.empty_like(weight)
            placed[:, found.order] = weight
            weight = placed
        return weight.to(dtype)


INTEGERS_OF = {
    "int4": Few(4, 128), "int4 zeros": Few(4, 32, zeros=True), "int4 offsets": Few(4, 16, zeros=True, offsets=True),
    "int4 rows": Few(4), "int4 table": Few(4, 64, table=True), "int4 ordered": Few(4, 32, ordered=True),
    "int8": Few(8), "int8 groups": Few(8, 32, zeros=True, offsets=True), "w8a8": Few(8, activations="int8"),
    "w8a8 zeros": Few(8, zeros=True, activations="int8"), "int8 both": Few(8, offsets=True, activations="int8"),
}  # fmt: skip
ROUNDINGS = {
    "wide": None, "token": Rounding("token"), "powers": Rounding("token", powers=True), "stored": Rounding("stored"),
}  # fmt: skip


def rounded8(x: Tensor) -> Tensor:
    """Each row to multiples of its largest magnitude / 127."""
    step = x.double().abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (x.double() / step).round() * step


def check(
    kernel: Any, fmt: Any, params: Mapping[str, Tensor], shape: tuple[int, int], rows: int, dtype: torch.dtype,
    *, bias: bool = True, shuffle: int | None = None,
) -> Seen:  # fmt: skip
    """x with gaps between its rows, against the reference in float64; where activations are rounded, its do too."""
    (n, k), noise = shape, torch.Generator().manual_seed(rows)
    x = torch.randn(rows, k + 3, generator=noise).to(dtype)[:, :k]
    b = torch.randn(n, generator=noise).to(dtype) if bias else None
    layer = LinearSpec("l", k, (n,))
    assert kernel.can_run(fmt, layer, GPU) is None
    packed = kernel.pack(fmt, dict(params), layer, dtype)
    with lab(unwritten=WRITTEN, shuffle=shuffle) as seen:
        got = kernel.apply(x, packed, b)
    read, times = x, EXACT
    if isinstance(packed, RoundedInputs) and packed.inputs == INTEGERS:
        read, times = rounded8(x), EIGHT_BITS
    elif isinstance(packed, RoundedInputs) and packed.inputs == FLOATS:
        read, times = fmt.inputs.apply(x.float(), packed.input_scale), EIGHT_BITS
    want = read.double() @ fmt.dequantize(dict(params), torch.float64).T + (0 if b is None else b.double())
    assert got.shape == (rows, n)
    assert got.dtype == dtype
    worst = float((got.double() - want).abs().max()) / max(1.0, float(want.abs().max()))
    assert worst <= times * CLOSE[dtype], f"{rows} rows: off by {worst:.2e}"
    return seen


def floats(shape: tuple[int, int], fmt: Fp8Format) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(shape[1])
    params = {"weight": torch.randn(shape, generator=noise).to(torch.float8_e4m3fn)}
    if fmt.block:
        (rows, columns), parts = fmt.block, fmt.parts
        sizes = sum(-(-n // rows) for n in parts), -(-shape[1] // columns)
        params[fmt.block_scales] = torch.rand(sizes, generator=noise) + 0.5
    elif fmt.rows:
        params["weight_scale"] = torch.rand(shape[0], 1, generator=noise) + 0.5
    else:
        params["weight_scale"] = torch.rand(len(fmt.parts), generator=noise) + 0.5
    if fmt.inputs and fmt.inputs.kind == "stored":
        params["input_scale"] = torch.full((len(fmt.parts),), 0.011)
    return params


@pytest.mark.one_in(33)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("name", INTEGERS_OF)
def test_integers(name: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        params = {"weight": torch.empty(shape)}
        for rows in (1, 5, 19):
            check(CODES, INTEGERS_OF[name], params, shape, rows, dtype, bias=rows != 5, shuffle=rows)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("how", ROUNDINGS)
def test_float8_of_rows_and_tensors(how: str, dtype: torch.dtype) -> None:
    for shape, rows in ((SHAPES[0], True), (SHAPES[0], False), (SHAPES[2], True)):
        parts = (shape[0],) if rows else (shape[0] - 8, 8)
        fmt = Fp8Format(None, parts, shape[1], rows=rows, inputs=ROUNDINGS[how])
        for tokens in (1, 18):
            check(FLOAT8, fmt, floats(shape, fmt), shape, tokens, dtype, shuffle=tokens)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("rounds", [None, False, True], ids=["wide", "groups", "powers"])
def test_float8_of_blocks(rounds: bool | None, dtype: torch.dtype) -> None:
    """Blocks that hold whole rows of the parts, and blocks that a part begins within; columns that fill no block."""
    inputs = None if rounds is None else Rounding("group", 32, rounds)
    for parts, k in (((64, 40), 100), ((20, 70), 64)):
        fmt = Fp8Format((32, 32), parts, k, inputs=inputs)
        shape = (sum(parts), k)
        for tokens in (1, 18):
            check(FLOAT8, fmt, floats(shape, fmt), shape, tokens, dtype, shuffle=tokens)


def test_four_bit_floats_are_exact() -> None:
    """All codes, as numbers, and not through a table."""
    fmt, n, k = MxFp4(parts=(16,), width=64), 16, 64
    noise = torch.Generator().manual_seed(0)
    codes = torch.arange(256, dtype=torch.uint8).repeat(2).view(n, k // 2)
    scales = torch.randint(120, 130, (n, 2), generator=noise, dtype=torch.uint8)
    params = {"weight_packed": codes, "weight_scale": scales}
    packed = CODES.pack(fmt, dict(params), LinearSpec("l", k, (n,)), torch.bfloat16)
    assert isinstance(packed, StackedCodes)
    assert packed.kind == FLOAT4
    with lab():
        for dtype in CLOSE:  # a row of the identity for each column
            found = CODES.apply(torch.eye(k, dtype=dtype), packed, None)
            assert torch.equal(found.T, fmt.dequantize(params, dtype))


def test_what_codes_are() -> None:
    layer = LinearSpec("l", 64, (8,))
    for name, kind in (("int4", WHOLE), ("int4 table", BYTES), ("int8 both", WHOLE)):
        packed = CODES.pack(INTEGERS_OF[name], {"weight": torch.empty(8, 64)}, layer, torch.bfloat16)
        assert isinstance(packed, StackedCodes)
        assert packed.kind == kind, name
    for name, zeros in (("w8a8", False), ("w8a8 zeros", True)):
        packed = CODES.pack(INTEGERS_OF[name], {"weight": torch.empty(8, 64)}, layer, torch.bfloat16)
        assert isinstance(packed, RoundedInputs)
        assert (packed.zeros is not None) == zeros


def test_float8_is_multiplied_where_the_device_does(monkeypatch: pytest.MonkeyPatch) -> None:
    fmt = Fp8Format(None, (16,), 32, inputs=Rounding("token"))
    params, layer = floats((16, 32), fmt), LinearSpec("l", 32, (16,))
    for name, inputs in (("gfx942", WIDE), ("gfx1100", WIDE), ("gfx950", FLOATS), ("cuda", FLOATS)):
        monkeypatch.setattr(linear, "architecture", lambda device, name=name: name)
        assert FLOAT8.pack(fmt, dict(params), layer, torch.bfloat16).inputs == inputs, name
    assert FLOAT8.pack(fmt, dict(params), layer, torch.float32).inputs == WIDE, "float32 asks for more"


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("name", "tile"),
    sorted(
        {
            (name, t)
            for sizes in tiles.tables().values()
            for name, ts in sizes.items()
            for t in ts
            if name.startswith("linear")
        },
        key=str,
    ),
)
def test_every_tile(name: str, tile: tiles.Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "tile_for", lambda *_: tile)
    dtype = torch.float32 if name.endswith("4") else torch.bfloat16
    shape = (70, 140)
    if "codes" in name:
        check(CODES, INTEGERS_OF["int4 zeros"], {"weight": torch.empty(shape)}, shape, 40, dtype)
    elif name.endswith("1"):
        check(CODES, INTEGERS_OF["w8a8 zeros"], {"weight": torch.empty(shape)}, shape, 40, dtype)
    else:
        fmt = Fp8Format((32, 32), (70,), 140)
        check(FLOAT8, fmt, floats(shape, fmt), shape, 40, dtype)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", ["int4", "int4 table", "int8", "w8a8", "float8", "float8 blocks"])
def test_a_decode_row_reads_the_weights_once(name: str) -> None:
    """With activations, parts and results a twentieth more than the weights; and packing makes them no larger."""
    n, k, dtype = 256, 4096, torch.bfloat16
    params: dict[str, Tensor] = {"weight": torch.empty(n, k)}
    kernel, fmt = (CODES, INTEGERS_OF.get(name)) if name in INTEGERS_OF else (FLOAT8, None)
    if fmt is None:
        fmt = Fp8Format((128, 128) if "blocks" in name else None, (n,), k)
        params = floats((n, k), fmt)
    packed = kernel.pack(fmt, dict(params), LinearSpec("l", k, (n,)), dtype)
    group = getattr(fmt, "group", 0)
    weights = n * k * (0.5 if "int4" in name else 1.0) + (n * k // group * 2 if group else 4 * n)
    assert packed.nbytes <= 1.01 * weights
    seen = check(kernel, fmt, params, (n, k), 1, dtype)
    codes = torch.empty(1, k, dtype=torch.int8)
    splits = 1 << 4
    rest = 2 * k + 4 * n + 8 * splits * n + (2 * codes.nbytes + 2 * k if name == "w8a8" else 0)
    assert seen.moved <= 1.05 * weights + rest
    assert seen.moved <= 1.2 * weights


def test_splits() -> None:
    """Enough programs for a device where there is work for them; parts never weigh more than an eighth."""
    tile = tiles.tile_for(torch.device("cpu"), "linear codes 2", 1)
    for m, n, k in ((1, 4096, 4096), (1, 28672, 8192), (16, 4096, 14336), (1, 32, 128), (64, 4096, 4096)):
        splits = splits_of(m, n, k, tile, 128, n * k // 2)
        assert splits & (splits - 1) == 0
        assert splits == 1 or 8 * splits * m * n <= n * k // 2 // 8
        assert splits == 1 or k // splits >= 4 * 128
        assert splits * linear.each_of(k, splits, 128) >= k
    assert splits_of(1, 4096, 4096, tile, 128, 4096 * 2048) == 2
    assert splits_of(1, 1024, 8192, tile, 128, 1024 * 4096) == 8


@pytest.mark.full
def test_parts_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their number, and where some have no columns; zeros of integers count once."""
    for splits in (2, 4, 8):
        monkeypatch.setattr(linear, "splits_of", lambda *_, splits=splits: splits)
        shape = (40, 300)
        for name in ("int4 zeros", "w8a8 zeros", "int4 ordered"):
            seen = check(CODES, INTEGERS_OF[name], {"weight": torch.empty(shape)}, shape, 3, torch.float32)
            assert seen.launches == (3 if "w8a8" in name else 2)
        fmt = Fp8Format((32, 32), (40,), 300, inputs=Rounding("group", 32))
        check(FLOAT8, fmt, floats(shape, fmt), shape, 3, torch.bfloat16)


def test_rows_of_zeros_and_no_rows() -> None:
    layer, x = LinearSpec("l", 64, (8,)), torch.zeros(2, 3, 64, dtype=torch.bfloat16)
    fmt = Fp8Format(None, (8,), 64, inputs=Rounding("token"))
    for kernel, form, params in (
        (CODES, INTEGERS_OF["w8a8 zeros"], {"weight": torch.empty(8, 64)}), (FLOAT8, fmt, floats((8, 64), fmt)),
    ):  # fmt: skip
        packed = kernel.pack(form, dict(params), layer, torch.bfloat16)
        with lab():
            assert torch.equal(kernel.apply(x, packed, None), x.new_zeros(2, 3, 8))
            assert kernel.apply(x[:0], packed, None).shape == (0, 3, 8)
            for wrong in (x[..., :63], x.double()):
                with pytest.raises(ValueError, match="a linear of 64 to 8 values got"):
                    kernel.apply(wrong, packed, None)
            with pytest.raises(ValueError, match="biases"):
                kernel.apply(x, packed, torch.zeros(7, dtype=torch.bfloat16))


def test_reasons_for_a_refusal() -> None:
    layer, old = LinearSpec("l", 64, (8,)), DeviceInfo("cuda", "gpu", capability=(7, 5))
    assert "the device has 7.5" in str(CODES.can_run(INTEGERS_OF["int4"], layer, old))
    assert "the device has 7.5" in str(FLOAT8.can_run(Fp8Format(None, (8,), 64), layer, old))
    assert "not plain" in str(CODES.can_run(PLAIN, layer, GPU))
    assert "not plain" in str(FLOAT8.can_run(PLAIN, layer, GPU))
    assert "not 24" in str(CODES.can_run(replace(INTEGERS_OF["int4"], group=24), layer, GPU))
    for fmt, reason in (
        (Fp8Format(None, (8,), 64, inputs=Rounding("tensor")), "not all of a step"),
        (Fp8Format((32, 32), (8,), 64, inputs=Rounding("group", 64)), "groups of activations like those of weights"),
        (Fp8Format((32, 32), (8,), 64, inputs=Rounding("token")), "a scale for each group"),
        (Fp8Format((32, 24), (8,), 64), "blocks of multiples of 16 columns, not 24"),
    ):
        assert reason in str(FLOAT8.can_run(fmt, layer, GPU))


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(INTEGERS_OF)), st.integers(1, 150), st.integers(1, 400), st.integers(1, 70), st.booleans(),
    st.sampled_from(sorted(CLOSE, key=str)),
)  # fmt: skip
def test_any_linear(name: str, n: int, k: int, rows: int, bias: bool, dtype: torch.dtype) -> None:
    check(CODES, INTEGERS_OF[name], {"weight": torch.empty(n, k)}, (n, k), rows, dtype, bias=bias, shuffle=rows)


# --------------------------------------------------------------------------------------------- faults put in on purpose

FAULTS = {
    "a row of x too many": ("row < m, tl.program_id(0)", "row < m + 1, tl.program_id(0)"),
    "the bias of another column": ("bias + i % n", "bias + i % (n - 1)"),
    "parts overlap": ("(2) * each\n    first", "(2) * (each - 2 * H)\n    first"),
    "parts are written over": ("out += tl.program_id(2).to(tl.int64) * m * n", "out += tl.program_id(2) * 0"),
    "only some parts": ("for split in range(SPLITS)", "for split in range(SPLITS - 1)"),
    "scales of the step before": ("first = (at + 2 * H) // GROUP * n", "first = at // GROUP * n"),
    "columns that are not there": ("(kk < k - at - H)[None, :]", "(kk < k - at)[None, :]"),
    "zeros with every part": ("tl.where(start == 0, m, 0)", "m"),
    "no zeros": ("y -= sums[None, :]", "y -= 0 * sums[None, :]"),
    "scales of the first block": ("scales + column // ROWS * groups", "scales + column * 0"),
    "groups of activations": ("x_scales + row * x_groups + at // GROUP", "x_scales + row * x_groups"),
    "cut, not rounded": ("(value + 12582912.0) - 12582912.0", "value * 1.0"),
    "the largest of the first block": (
        "    for first in range(0, k, N):\n        i = first + tl.arange(0, N)\n        largest",
        "    for first in range(0, N, N):\n        i = first + tl.arange(0, N)\n        largest",
    ),
    "the power of two below": ("(bits + 0x7FFFFF)", "(bits + 0)"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "splits_of", lambda *_: 2)
    monkeypatch.setattr(linear, "BLOCK", 64)
    monkeypatch.setattr(linear, "ROUNDED", 64)
    shape = (70, 300)

    def checks() -> None:
        for form in ("int4 zeros", "w8a8 zeros"):
            check(CODES, INTEGERS_OF[form], {"weight": torch.empty(shape)}, shape, 5, torch.float32)
        for fmt in (
            Fp8Format((32, 32), (70,), 300, inputs=Rounding("group", 32, powers=True)),
            Fp8Format(None, (70,), 300, inputs=Rounding("token")),
        ):
            check(FLOAT8, fmt, floats(shape, fmt), shape, 5, torch.float16)

    with mutant(linear, *FAULTS[name], tmp_path), pytest.raises(AssertionError):
        checks()
    checks()


def ptx(text: str, register: int) -> list[int]:
    """What PTX of `and`, `shr`, `mov` and `prmt` makes of a register: the results, in order."""
    values: dict[str, int] = {}
    lines = [line.strip() for line in text.strip(" {}").split(";") if line.strip() and ".reg" not in line]
    results = len({line.split()[1] for line in lines if line.split()[1].startswith("$")})
    values[f"${results}"] = register

    def value(name: str) -> int:
        return values[name] if name in values else int(name, 0)

    for line in lines:
        op, target, first, *others = line.replace(",", " ").split()
        a, rest = value(first), [value(name) for name in others]
        if op == "prmt.b32":
            eight = (a | rest[0] << 32).to_bytes(8, "little")
            values[target] = int.from_bytes([eight[rest[1] >> 4 * i & 7] for i in range(4)], "little")
        elif op == "and.b32":
            values[target] = a & rest[0]
        else:
            values[target] = a >> rest[0] if op == "shr.u32" else a
    return [values[f"${i}"] for i in range(results)]


@pytest.mark.parametrize("half", ["low", "high", "byte"])
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32"])
def test_ptx_puts_codes_where_the_laboratory_does(half: str, kind: str) -> None:
    """What no interpreter runs: every byte, in every place of a register, becomes 2 ** n and its code."""
    name = f"{half.upper()}_{kind.upper()}"
    if not hasattr(weight_kernels, name):
        pytest.skip("8 bits do not fit into bfloat16's mantissa")
    text, dtype = getattr(weight_kernels, name).value, getattr(torch, kind)
    base = {"bfloat16": 128, "float16": 1024, "float32": 2**23}[kind]
    for first in range(0, 256, 4):
        codes = bytes([first, 255 - first, first + 2, first ^ 0x5A])
        found = b"".join(r.to_bytes(4, "little") for r in ptx(text, int.from_bytes(codes, "little")))
        numbers = torch.frombuffer(bytearray(found), dtype=dtype).double() - base
        wanted = {"low": [c & 15 for c in codes], "high": [c >> 4 for c in codes], "byte": list(codes)}[half]
        assert numbers.tolist() == wanted
