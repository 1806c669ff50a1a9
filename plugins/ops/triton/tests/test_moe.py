"""Mixtures in the laboratory: the reference's values, in bounds, no races, every output written, few bytes."""

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
from lmkit_layers import LinearExperts, ReferenceLinear, TorchRowOps
from lmkit_layers.linear import PLAIN, PlainFormat
from lmkit_layouts import Fp8Format
from lmkit_op_triton import moe, tiles
from lmkit_op_triton.moe import TritonExperts
from lmkit_testing import PluginConformance
from lmkit_testing.triton_lab import Seen, lab, mutant
from torch import Tensor

KERNEL, ROWS = TritonExperts(), TorchRowOps()
# Of the largest value. The activations between are rounded once where the reference rounds twice.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}
WRITTEN = ("order", "starts", "out")
# experts, top_k, hidden, middle, gated, bias, activation
SHAPES: list[tuple[int, int, int, int, bool, bool, str]] = [
    (4, 2, 64, 32, True, False, "silu"),
    (5, 3, 33, 70, False, True, "relu2"),
    (3, 1, 7, 1, True, True, "swiglu_clamped"),
    (8, 8, 130, 96, True, False, "gelu_pytorch_tanh"),
    (2, 2, 1, 45, False, False, "gelu"),
]


@dataclass(frozen=True)
class Rounded(PlainFormat):
    """Weights that are multiples of a step per group, so that integers hold them exactly."""

    bits: int
    group: int
    turned: bool = False  # codes stand for others, in a table
    shifted: bool = False  # with zeros of their own, and offsets
    name: str = "rounded"
    ordered: bool = False
    activations: str = "float"
    rounding: str = ""

    def integers(self, params: Mapping[str, Tensor]) -> Integers:
        weight, zero = params["weight"].float(), 1 << (self.bits - 1)
        scales = torch.full((len(weight), -(-weight.shape[1] // (self.group or weight.shape[1]))), 1 / 16)
        codes = (weight * 16 + zero).to(torch.uint8)
        if self.turned:
            return Integers(15 - codes, scales, zero, table=torch.arange(15, -1, -1, dtype=torch.uint8))
        if not self.shifted:
            return Integers(codes, scales, zero)
        shift = torch.arange(scales.numel()).view(scales.shape) % 5 - 2  # of zeros; offsets make up for it
        zeros = (zero + shift).to(torch.uint8)
        return Integers(codes, scales, zeros, offsets=-shift / 16)


FORMATS = {
    "int8": Rounded(8, 0),
    "int8 groups": Rounded(8, 32, shifted=True),
    "int4": Rounded(4, 128),
    "int4 narrow": Rounded(4, 16, shifted=True),
    "int4 table": Rounded(4, 32, turned=True),
}


class TestTriton(PluginConformance):
    plugin = "op:moe_triton"


@dataclass
class Stacked:
    """A linear of all experts, as layers hold it."""

    spec: LinearSpec
    bias: Tensor | None
    weight: Tensor
    kernel: Any
    packed: Any = None


@dataclass
class Mixture:
    up: Stacked
    down: Stacked
    act: str

    @classmethod
    def make(cls, shape: tuple[int, int, int, int, bool, bool, str], dtype: torch.dtype, fmt: Any = PLAIN) -> Mixture:
        """Weights are multiples of 1 / 16 that four bits hold; none is asymmetric around the code 8."""
        num, _, hidden, middle, gated, biased, act = shape
        noise, made = torch.Generator().manual_seed(hidden + middle), []
        for name, parts, n, k in (("up", 1 + gated, middle, hidden), ("down", 1, hidden, middle)):
            names = tuple(f"{e}.{p}" for e in range(num) for p in range(parts))
            spec = LinearSpec(name, k, (n,) * (num * parts), biased, "none", names, (), num)
            weight = (torch.randint(-7, 8, (spec.total_out, k), generator=noise) / 16).to(dtype)
            bias = torch.randn(spec.total_out, generator=noise).to(dtype) if biased else None
            made.append(Stacked(spec, bias, weight, KERNEL))
            made[-1].packed = KERNEL.pack(fmt, {"weight": weight.clone()}, spec, dtype)
        return cls(*made, act)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return KERNEL.apply(x, ids, weights, self.up, self.down, self.act, ROWS)

    def reference(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """One expert at a time, in float64."""
        experts, made, dtype = LinearExperts(ReferenceLinear()), [], torch.float64
        for linear in (self.up, self.down):
            bias = None if linear.bias is None else linear.bias.to(dtype)
            packed = experts.pack(PLAIN, {"weight": linear.weight.to(dtype)}, linear.spec, dtype)
            made.append(Stacked(linear.spec, bias, linear.weight, experts, packed))
        return experts.apply(x.to(dtype), ids, weights.to(dtype), made[0], made[1], self.act, ROWS)


def of_float8(shape: tuple[int, int, int, int, bool, bool, str], dtype: torch.dtype, block: int) -> Mixture:
    """Weights of float8 at random: with a scale for each block of `block` x `block`, or (0) for each row."""
    made = Mixture.make(shape, dtype)
    for linear in (made.up, made.down):
        spec, noise = linear.spec, torch.Generator().manual_seed(3)
        fmt = Fp8Format((block, block) if block else None, spec.out_features, spec.in_features, rows=not block)
        params = {"weight": torch.randn(linear.weight.shape, generator=noise).to(torch.float8_e4m3fn)}
        for name, param in fmt.params(spec, "float32").items():
            if name != "weight" and not param.optional:
                params[name] = torch.rand(param.shape, generator=noise) + 0.5
        assert KERNEL.can_run(fmt, spec, DeviceInfo("cuda", "gpu", capability=(8, 0)), None) is None
        linear.weight = fmt.dequantize(params, torch.float64)
        linear.packed = KERNEL.pack(fmt, params, spec, dtype)
    return made


def batch(shape: tuple[Any, ...], tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x with gaps between its rows; the first experts are chosen more often, some of the last by nobody."""
    num, top_k, hidden = shape[:3]
    noise = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden + 3, generator=noise).to(dtype)[:, :hidden]
    likely = torch.arange(num, 0, -1).double() ** 2
    ids = torch.multinomial(likely.expand(tokens, num), top_k, generator=noise)
    return x, ids, torch.rand(tokens, top_k, generator=noise).to(dtype)


def check(mixture: Mixture, x: Tensor, ids: Tensor, weights: Tensor, shuffle: int | None = None) -> Seen:
    with lab(unwritten=() if ids.min() < 0 else WRITTEN, shuffle=shuffle) as seen:
        got = mixture(x, ids, weights)
    want = mixture.reference(x, ids, weights)
    assert got.shape == want.shape
    assert got.dtype == x.dtype
    worst = float((got.double() - want).abs().max()) / max(1.0, float(want.abs().max()))
    assert worst <= CLOSE[x.dtype], f"{len(x)} tokens: off by {worst:.2e}"
    assert seen.launches == 4
    return seen


@pytest.mark.one_in(8)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_one_expert_at_a_time(shape: Any, dtype: torch.dtype) -> None:
    mixture = Mixture.make(shape, dtype)
    for tokens in (1, 3, 19):
        check(mixture, *batch(shape, tokens, dtype), shuffle=tokens)


@pytest.mark.full
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_weights_of_few_bits(fmt: str, dtype: torch.dtype) -> None:
    """Whatever columns are left over; halves of a pair that are not there are not read."""
    for shape in (SHAPES[0], SHAPES[2], (3, 2, 140, 70, True, True, "silu"), (3, 1, 72, 33, False, False, "relu")):
        mixture = Mixture.make(shape, dtype, FORMATS[fmt])
        for tokens in (1, 7):
            check(mixture, *batch(shape, tokens, dtype), shuffle=tokens)


@pytest.mark.full
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("block", [0, 16, 32])
def test_weights_of_float8(block: int, dtype: torch.dtype) -> None:
    """Blocks that experts fill, and those that an expert begins within; activations stay as they are."""
    for shape in ((3, 2, 64, 96, True, False, "silu"), (3, 2, 140, 70, True, True, "silu"), SHAPES[2]):
        mixture = of_float8(shape, dtype, block)
        for tokens in (1, 7):
            check(mixture, *batch(shape, tokens, dtype), shuffle=tokens)


@pytest.mark.full
@pytest.mark.parametrize("block", [0, 128])
def test_a_decode_row_reads_the_float8_of_the_chosen_experts_once(block: int) -> None:
    shape = (16, 2, 512, 384, True, False, "silu")
    mixture, operands = of_float8(shape, torch.bfloat16, block), batch(shape, 1, torch.bfloat16)
    weights = 2 * 3 * 512 * 384
    assert mixture.up.packed.nbytes + mixture.down.packed.nbytes <= 1.02 * 16 / 2 * weights
    assert check(mixture, *operands).moved <= 1.05 * weights + 4 * 16 * 512


@pytest.mark.full("lmkit-op-triton")
def test_a_decode_row_reads_the_codes_of_the_chosen_experts_once() -> None:
    shape = (16, 2, 512, 384, True, False, "silu")
    for fmt, byte in (("int4", 0.5), ("int4 table", 0.5), ("int8", 1.0)):
        mixture, operands = Mixture.make(shape, torch.bfloat16, FORMATS[fmt]), batch(shape, 1, torch.bfloat16)
        group = FORMATS[fmt].group
        weights = 2 * 3 * 512 * 384 * (byte + (2 / group if group else 0))
        packed = mixture.up.packed.nbytes + mixture.down.packed.nbytes
        assert packed <= 1.01 * 16 / 2 * weights
        assert check(mixture, *operands).moved <= 1.05 * weights + 4 * 16 * 512  # with activations, as plain weights


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 5), st.integers(1, 140), st.integers(1, 140), st.booleans(), st.booleans(),
    st.sampled_from(sorted(moe.ACTIVATIONS)), st.sampled_from(sorted(CLOSE, key=str)), st.integers(1, 150),
)  # fmt: skip
def test_any_mixture(
    num: int, top_k: int, hidden: int, middle: int, gated: bool, bias: bool, act: str, dtype: torch.dtype, tokens: int
) -> None:
    act = act if gated or act in moe.PLAIN else "relu"
    shape = (num, min(top_k, num), hidden, middle, gated, bias, act)
    check(Mixture.make(shape, dtype), *batch(shape, tokens, dtype), shuffle=tokens)


@pytest.mark.parametrize("tokens", [33, pytest.param(200, marks=pytest.mark.full)])
def test_one_expert_has_all_tokens(tokens: int) -> None:
    """More rows than a tile has, of every tile in the tables."""
    shape = (3, 1, 40, 24, True, True, "silu")
    mixture, (x, ids, weights) = Mixture.make(shape, torch.bfloat16), batch(shape, tokens, torch.bfloat16)
    for chosen in (0, 2):
        check(mixture, x, torch.full_like(ids, chosen), weights)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "tile",
    sorted(
        {
            t
            for sizes in tiles.tables().values()
            for name, ts in sizes.items()
            for t in ts
            if not name.startswith(("linear", "row"))
        },
        key=str,
    ),
)
def test_every_tile(tile: tiles.Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "tile_for", lambda *_: tile)
    shape = (3, 2, 140, 70, True, True, "silu")
    check(Mixture.make(shape, torch.bfloat16), *batch(shape, 40, torch.bfloat16))


def test_a_token_is_the_same_in_every_batch() -> None:
    shape = SHAPES[0]
    mixture, (x, ids, weights) = Mixture.make(shape, torch.bfloat16), batch(shape, 9, torch.bfloat16)
    with lab(shuffle=1):
        whole = mixture(x, ids, weights)
        for row in (0, 5):
            alone = slice(row, row + 1)
            assert torch.equal(mixture(x[alone], ids[alone], weights[alone])[0], whole[row])


def test_experts_of_other_ranks_add_nothing() -> None:
    mixture = Mixture.make(SHAPES[0], torch.float32)
    x, ids, weights = batch(SHAPES[0], 6, torch.float32)
    with lab(unwritten=()):
        here = mixture(x, ids.masked_fill(ids % 2 == 0, -1), weights)
        nothing = mixture(x, torch.full_like(ids, -1), weights)
    want = mixture.reference(x, ids, weights.masked_fill(ids % 2 == 0, 0))
    torch.testing.assert_close(here.double(), want, atol=1e-4, rtol=1e-4)
    assert torch.equal(nothing, torch.zeros_like(x))


def test_an_expert_that_is_none_shows() -> None:
    """In the result of its own token only, whatever the number."""
    mixture, (x, ids, weights) = Mixture.make(SHAPES[0], torch.float32), batch(SHAPES[0], 6, torch.float32)
    with lab():
        want = mixture(x, ids, weights)
        for bad in (-2, 4, 1 << 62, -(1 << 63), (1 << 32) + 1):
            wrong = ids.clone()
            wrong[2, 1] = bad
            got = mixture(x, wrong, weights)
            assert got[2].isnan().all()
            assert torch.equal(torch.cat((got[:2], got[3:])), torch.cat((want[:2], want[3:])))
        assert mixture(x, torch.full_like(ids, 7), weights).isnan().all()


def test_any_strides_and_no_tokens() -> None:
    mixture, operands = Mixture.make(SHAPES[0], torch.float32), batch(SHAPES[0], 5, torch.float32)
    turned = [t.T.contiguous().T for t in operands]
    with lab():
        assert torch.equal(mixture(turned[0], turned[1], turned[2]), mixture(*operands))
    x, ids, weights = (t[:0] for t in operands)
    assert mixture(x, ids, weights).shape == (0, 64)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("gated", [True, False])
def test_a_decode_row_reads_the_chosen_experts_once(dtype: torch.dtype, gated: bool) -> None:
    """Choices, sorting, activations and products included: a twentieth more than their weights."""
    shape = (16, 2, 512, 384, gated, False, "silu")
    mixture, operands = Mixture.make(shape, dtype), batch(shape, 1, dtype)
    weights = 2 * (2 + gated) * 512 * 384 * dtype.itemsize
    assert check(mixture, *operands).moved <= 1.05 * weights


def test_grids_hold_every_distribution() -> None:
    """As many tiles as there are rows at worst, and programs enough for them."""
    for experts, pairs, rows in ((1, 1, 16), (4, 9, 16), (8, 40, 16), (128, 1024, 16), (3, 1000, 64)):
        most = moe.most_tiles(pairs, experts, rows)
        worst = min(pairs, experts)  # each has a row, one has the rest
        assert worst - 1 + -(-(pairs - worst + 1) // rows) <= most
        even = [pairs // experts + (e < pairs % experts) for e in range(experts)]
        assert sum(-(-n // rows) for n in even) <= most <= pairs


def test_tables() -> None:
    """Each device has tiles for any number of rows, the smaller ones first."""
    for device, sizes in tiles.tables().items():
        for name, some in sizes.items():
            rows = [t.rows for t in some]
            if name in ("linear plain", "row of codes"):  # of more rows others are asked
                rows.append(None)
            assert rows[-1] is None
            assert sorted(filter(None, rows)) == rows[:-1], device
    assert tiles.tiles_of("sm_89", "2") != tiles.tiles_of("sm_90", "2") == tiles.tiles_of("cuda", "2")
    assert tiles.tiles_of("sm_89", "4") == tiles.tiles_of("cuda", "4")
    assert tiles.tiles_of("gfx942", "2") == tiles.tables()["rocm"]["2"]
    assert tiles.tile_for(torch.device("cpu"), "2", 17).m == 64


def test_what_does_not_fit_is_refused() -> None:
    mixture = Mixture.make((4, 2, 8, 6, True, True, "silu"), torch.float32)
    x, ids, weights = torch.randn(3, 8), torch.zeros(3, 2).long(), torch.rand(3, 2)
    for operands in (
        (x[:, :7], ids, weights), (x[:2], ids, weights), (x.bfloat16(), ids, weights.bfloat16()),
        (x, ids.int(), weights), (x, ids, weights[:, :1]), (x, ids, weights.half()),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="4 experts of 8 to 8 values got"):
            mixture(*operands)
    for linear in (mixture.up, mixture.down):
        whole, linear.bias = linear.bias, torch.randn(3)
        with pytest.raises(ValueError, match="4 experts"):
            mixture(x, ids, weights)
        linear.bias = whole


def test_reasons_for_a_refusal() -> None:
    one = LinearSpec("up", 40, (24,) * 3, False, "none", (), (), 3)
    both = LinearSpec("up", 40, (24,) * 6, False, "none", (), (), 3)
    gpu = DeviceInfo("cuda", "gpu", capability=(9, 0))
    assert KERNEL.can_run(PLAIN, one, gpu, "silu") is None
    assert KERNEL.can_run(PLAIN, one, gpu) is None
    assert KERNEL.can_run(PLAIN, both, gpu, "swiglu_clamped") is None
    assert "not xielu" in str(KERNEL.can_run(PLAIN, both, gpu, "xielu"))
    assert "not swiglu_clamped" in str(KERNEL.can_run(PLAIN, one, gpu, "swiglu_clamped")), "it has one part only"
    for fmt, reason in (
        (replace(FORMATS["int4"], group=24), "groups of multiples of 16 columns, not 24"),
        (replace(FORMATS["int4"], ordered=True), "own order"),
        (replace(FORMATS["int4"], bits=3), "4 or 8 bits, not rounded"),
    ):
        assert reason in str(KERNEL.can_run(fmt, both, gpu, "silu"))
    assert KERNEL.can_run(FORMATS["int8"], both, gpu, "silu") is None
    old = DeviceInfo("cuda", "gpu", capability=(7, 5))
    assert "the device has 7.5" in str(KERNEL.can_run(PLAIN, one, old, "silu"))


def test_packing_gives_the_original_up() -> None:
    spec = LinearSpec("up", 40, (24,) * 6, False, "none", (), (), 3)
    params = {"weight": torch.randn(144, 40)}
    packed = KERNEL.pack(PLAIN, params, spec, torch.bfloat16)
    assert not params
    assert packed.nbytes == 144 * 40 * 2


# --------------------------------------------------------------------------------------------- faults put in on purpose

FAULTS = {
    "an expert begins a pair too early": ("tl.store(starts + expert, start)", "tl.store(starts + expert, start - 1)"),
    "pairs of the next expert, too": ("(e >= 0) & (e < expert)", "(e >= 0) & (e <= expert)"),
    "only the first block is placed": ("        start += tl.sum(mine, 0)\n", ""),
    "no end": ("tl.store(starts + experts, start)", "tl.store(starts + experts, start - 1)"),
    "tiles overlap": ("(tile - behind + tiles) * M", "(tile - behind + tiles) * (M - 1)"),
    "a tile too few": ("(ends - begins + M - 1) // M", "(ends - begins) // M"),
    "a tile runs on": ("valid = row < end", "valid = row < end + 1"),
    "rows of pairs, not tokens": ("pair // top_k if FIRST else row", "pair if FIRST else row"),
    "as sorted": ("row if FIRST else pair", "row"),
    "the weight of the next expert": ("weight + (expert *", "weight + ((expert + 1) *"),
    "gate for up": ("w_at + n * k + at", "w_at + at"),
    "columns that are not there": ("left = kk < k - at", "left = kk < k + 0 * at"),
    "bias of the gate for both": ("b_at + n, column", "b_at, column"),
    "scales of the next row": ("column) // ROWS * groups\n    of_z", "column + 1) // ROWS * groups\n    of_z"),
    "up by the scales of the gate": ("* PARTS * n + n + column) // ROWS", "* PARTS * n + column) // ROWS"),
    "unweighted": ("total += share * values", "total += values + 0 * share"),
    "the same choice twice": ("pair = token * top_k + choice", "pair = token * top_k + choice // 2"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (5, 3, 150, 70, True, True, "silu")
    mixture, operands = Mixture.make(shape, torch.float32), batch(shape, 33, torch.float32)
    monkeypatch.setattr(moe, "BLOCK", 32)
    monkeypatch.setattr(moe, "tile_for", lambda *_: tiles.Tile(None, 16, 32, 64, 4, 2))
    if "scales" in name:
        mixture = of_float8(shape, torch.float32, 0)
    with mutant(moe, *FAULTS[name], tmp_path), pytest.raises(AssertionError):
        check(mixture, *operands)
    check(mixture, *operands)
