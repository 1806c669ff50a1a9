"""Native mixtures of experts: types, weight formats and instruction sets against float64, one expert at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lmkit.api import DeviceInfo, Integers, LinearSpec
from lmkit_layers import LinearExperts, ReferenceLinear, TorchRowOps
from lmkit_layers.linear import PLAIN, PlainFormat
from lmkit_platform_cpu.experts import NativeExperts
from lmkit_platform_cpu.integer import IntegerLinear
from lmkit_platform_cpu.native import Native, load
from lmkit_testing import PluginConformance
from torch import Tensor

LIBRARY = load()
needs_library = pytest.mark.skipif(LIBRARY is None, reason="the native library is not built here")
ISAS = LIBRARY.isas if LIBRARY is not None else ()
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
CPU = DeviceInfo("cpu", "cpu")
ROWS = TorchRowOps()
# experts, top_k, hidden, middle, gated, bias, activation
SHAPES: list[tuple[int, int, int, int, bool, bool, str]] = [
    (4, 2, 64, 32, True, False, "silu"),
    (5, 3, 33, 70, False, True, "relu2"),
    (3, 1, 7, 1, True, True, "swiglu_clamped"),
    (8, 8, 130, 96, True, False, "gelu_pytorch_tanh"),
    (2, 2, 1, 45, False, False, "gelu"),
]
TOKENS = (0, 1, 3, 16)
if os.environ.get("KERNEL_GRID"):  # set by `nox -s kernels`
    SHAPES += [(64, 8, 256, 96, True, True, "silu"), (3, 2, 1301, 300, True, False, "relu")]
    TOKENS += (65, 300)


class TestExperts(PluginConformance):
    plugin = "op:moe_native"


@pytest.fixture
def native() -> Iterator[Native]:
    assert LIBRARY is not None
    before = LIBRARY.threads
    LIBRARY.start(3)
    yield LIBRARY
    LIBRARY.set_isa("auto")
    LIBRARY.start(before)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is full of NaN: what is read before it was written shows."""
    empty = torch.empty

    def poison(*args: Any, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(torch.nan if made.is_floating_point() else 0x7F)

    monkeypatch.setattr(torch, "empty", poison)


@dataclass(frozen=True)
class Rounded(PlainFormat):
    """Weights that are multiples of a step per group, so that integers hold them exactly."""

    bits: int
    group: int
    activations: str
    turned: bool = False  # codes stand for others, in a table
    name: str = "rounded"
    rounding: str = ""
    ordered: bool = False

    def integers(self, params: Mapping[str, Tensor]) -> Integers:
        weight, zero = params["weight"].float(), 1 << (self.bits - 1)
        scales = torch.full((len(weight), -(-weight.shape[1] // (self.group or weight.shape[1]))), 1 / 16)
        zeros = torch.full_like(scales, zero, dtype=torch.uint8) if self.group else zero
        codes = (weight * 16 + zero).to(torch.uint8)
        if not self.turned:
            return Integers(codes, scales, zeros)
        return Integers(15 - codes, scales, zeros, table=torch.arange(15, -1, -1, dtype=torch.uint8))


FORMATS = {
    "int8": Rounded(8, 0, "float"),
    "int8 groups": Rounded(8, 32, "float"),
    "w8a8": Rounded(8, 0, "int8"),
    "int4": Rounded(4, 64, "int8"),
    "int4 exact": Rounded(4, 128, "float"),
    "int4 table": Rounded(4, 32, "int8", True),
}


@dataclass
class Stacked:
    """A linear of all experts, as layers hold it."""

    spec: LinearSpec
    bias: Tensor | None
    weight: Tensor
    kernel: Any
    packed: Any = field(default=None)


@dataclass
class Mixture:
    up: Stacked
    down: Stacked
    act: str

    @classmethod
    def make(cls, shape: tuple[int, int, int, int, bool, bool, str], dtype: torch.dtype, fmt: Any = PLAIN) -> Mixture:
        """Weights are multiples of 1 / 16 that four bits hold; none is asymmetric around the code 8."""
        num, _, hidden, middle, gated, biased, act = shape
        noise = torch.Generator().manual_seed(hidden + middle)
        made = []
        for name, parts, n, k in (("up", 1 + gated, middle, hidden), ("down", 1, hidden, middle)):
            names = tuple(f"{e}.{p}" for e in range(num) for p in range(parts))
            spec = LinearSpec(name, k, (n,) * (num * parts), biased, "none", names, (), num)
            weight = (torch.randint(-7, 8, (spec.total_out, k), generator=noise) / 16).to(dtype)
            bias = torch.randn(spec.total_out, generator=noise).to(dtype) if biased else None
            made.append(Stacked(spec, bias, weight, NativeExperts()))
            made[-1].packed = made[-1].kernel.pack(fmt, {"weight": weight.clone()}, spec, dtype)
        return cls(made[0], made[1], act)

    def native(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.up.kernel.apply(x, ids, weights, self.up, self.down, self.act, ROWS)

    def reference(
        self, x: Tensor, ids: Tensor, weights: Tensor, kernel: Any = None, fmt: Any = PLAIN,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:  # fmt: skip
        """One expert at a time, on a kernel for linears; torch in float64 if none is given."""
        experts, made = LinearExperts(kernel or ReferenceLinear()), []
        for linear in (self.up, self.down):
            bias = None if linear.bias is None else linear.bias.to(dtype)
            packed = experts.pack(fmt, {"weight": linear.weight.to(dtype)}, linear.spec, dtype)
            made.append(Stacked(linear.spec, bias, linear.weight, experts, packed))
        return experts.apply(x.to(dtype), ids, weights.to(dtype), *made, self.act, ROWS)


def batch(shape: tuple[Any, ...], tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x with gaps between its rows; the first experts are chosen more often, some of the last by nobody."""
    num, top_k, hidden = shape[:3]
    noise = torch.Generator().manual_seed(tokens)
    x = torch.full((tokens, hidden + 3), torch.nan, dtype=dtype)[:, :hidden]
    x.copy_(torch.randn(tokens, hidden, generator=noise))
    likely = torch.arange(num, 0, -1).double() ** 2
    ids = torch.multinomial(likely.expand(tokens, num), top_k, generator=noise) if tokens else torch.zeros(0, top_k)
    return x, ids.long(), torch.rand(tokens, top_k, generator=noise).to(dtype)


def check(native: Native, mixture: Mixture, x: Tensor, ids: Tensor, weights: Tensor, tolerance: float) -> None:
    """Near the reference; each token as if it stood alone, bit for bit; the same on any number of threads."""
    got, want = mixture.native(x, ids, weights), mixture.reference(x, ids, weights)
    assert got.shape == want.shape
    assert got.dtype == x.dtype
    if not len(x):
        return
    worst = (got.double() - want).abs().max() / max(1.0, float(want.abs().max()))
    assert worst <= tolerance, f"{len(x)} tokens: off by {worst:.2e}"
    for row in {0, len(x) // 2, len(x) - 1}:
        alone = slice(row, row + 1)
        assert torch.equal(mixture.native(x[alone], ids[alone], weights[alone])[0], got[row]), f"token {row}"
    native.start(1)
    assert torch.equal(mixture.native(x, ids, weights), got), "the same on one thread"
    native.start(3)


@needs_library
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_equals_one_expert_at_a_time(native: Native, isa: str, dtype: torch.dtype) -> None:
    native.set_isa(isa)
    for shape in SHAPES:
        mixture = Mixture.make(shape, dtype)
        for tokens in TOKENS:
            check(native, mixture, *batch(shape, tokens, dtype), TOLERANCE[dtype])


@pytest.mark.one_in(3)
@needs_library
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_of_few_bits(native: Native, isa: str, fmt: str, dtype: torch.dtype) -> None:
    """The error is that of rounding activations: 16 bits are as good as the type, 8 bits cost a hundredth."""
    native.set_isa(isa)
    error = 3e-2 if FORMATS[fmt].activations == "int8" else max(1e-3, TOLERANCE[dtype])
    for shape in SHAPES[:4] + SHAPES[5:]:
        mixture = Mixture.make(shape, dtype, FORMATS[fmt])
        for tokens in TOKENS[1:]:
            check(native, mixture, *batch(shape, tokens, dtype), error)


@needs_library
@pytest.mark.parametrize("rounding", ["symmetric", "range"])
def test_rounding_while_packing(native: Native, rounding: str) -> None:
    """As linears of single experts are rounded, also where parts do not fill whole panels."""
    fmt: Any = Rounded(8 if rounding == "symmetric" else 4, 32, "float", rounding=rounding)
    for shape in SHAPES[:2]:
        mixture = Mixture.make(shape, torch.float32, fmt)
        x, ids, weights = batch(shape, 5, torch.float32)
        want = mixture.reference(x, ids, weights, IntegerLinear(), fmt, torch.float32)
        torch.testing.assert_close(mixture.native(x, ids, weights), want, atol=1e-3, rtol=1e-3)


@needs_library
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("chosen", [0, 2])
def test_one_expert_has_all_tokens(native: Native, isa: str, chosen: int) -> None:
    """More rows than a chunk takes."""
    native.set_isa(isa)
    shape = (3, 1, 70, 40, True, True, "silu")
    x, ids, weights = batch(shape, 131, torch.bfloat16)
    check(native, Mixture.make(shape, torch.bfloat16), x, torch.full_like(ids, chosen), weights, 1e-2)


@needs_library
def test_an_expert_that_is_none_shows(native: Native) -> None:
    """In the result of its own token only, whatever the number."""
    mixture = Mixture.make(SHAPES[0], torch.float32)
    x, ids, weights = batch(SHAPES[0], 6, torch.float32)
    want = mixture.native(x, ids, weights)
    for bad in (-2, 4, 1 << 62, -(1 << 63)):
        wrong = ids.clone()
        wrong[2, 1] = bad
        got = mixture.native(x, wrong, weights)
        assert got[2].isnan().all()
        assert torch.equal(torch.cat((got[:2], got[3:])), torch.cat((want[:2], want[3:])))
    assert mixture.native(x, torch.full_like(ids, 7), weights).isnan().all()


@needs_library
@pytest.mark.parametrize("fmt", [PLAIN, FORMATS["int4"]], ids=["plain", "int4"])
def test_experts_of_other_ranks_add_nothing(native: Native, fmt: Any) -> None:
    mixture = Mixture.make(SHAPES[0], torch.bfloat16, fmt)
    x, ids, weights = batch(SHAPES[0], 6, torch.bfloat16)
    here, none = ids.masked_fill(ids % 2 == 0, -1), torch.full_like(ids, -1)
    assert torch.equal(mixture.native(x, here, weights), mixture.native(x, ids, weights.masked_fill(ids % 2 == 0, 0)))
    assert torch.equal(mixture.native(x, none, weights), torch.zeros_like(x))


@needs_library
def test_captured_steps_follow_their_choices(native: Native) -> None:
    """How the work is cut is decided when a tape runs, not when it was recorded."""
    mixture = Mixture.make(SHAPES[0], torch.bfloat16)
    x, ids, weights = batch(SHAPES[0], 16, torch.bfloat16)
    kept: list[Tensor] = []
    empty = torch.empty

    def keep(*args: Any, **kwargs: Any) -> Tensor:
        kept.append(empty(*args, **kwargs))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch, native.capture() as tape:
        patch.setattr(torch, "empty", keep)
        out = mixture.native(x, ids, weights)
    for choice in (ids.clone(), ids.flip(0), torch.zeros_like(ids)):
        ids.copy_(choice)
        tape.run()
        assert torch.equal(out, mixture.native(x, ids, weights))


@needs_library
def test_any_strides(native: Native) -> None:
    mixture = Mixture.make(SHAPES[0], torch.float32)
    operands = batch(SHAPES[0], 5, torch.float32)
    turned = [t.T.contiguous().T for t in operands]
    assert torch.equal(mixture.native(turned[0], turned[1], turned[2]), mixture.native(*operands))


@needs_library
def test_what_does_not_fit_is_refused(native: Native) -> None:
    mixture = Mixture.make((4, 2, 8, 6, True, True, "silu"), torch.float32)
    x, ids, weights = torch.randn(3, 8), torch.zeros(3, 2).long(), torch.rand(3, 2)
    changes: list[Callable[[], tuple[Tensor, Tensor, Tensor]]] = [
        lambda: (x[:, :7], ids, weights),
        lambda: (x[:2], ids, weights),
        lambda: (x.bfloat16(), ids, weights.bfloat16()),
        lambda: (x, ids.int(), weights),
        lambda: (x, ids, weights[:, :1]),
        lambda: (x, ids, weights.half()),
    ]
    for change in changes:
        with pytest.raises(ValueError, match="4 experts of 8 to 8 values got"):
            mixture.native(*change())
    for linear in (mixture.up, mixture.down):
        whole, linear.bias = linear.bias, torch.randn(3)
        with pytest.raises(ValueError, match="4 experts"):
            mixture.native(x, ids, weights)
        linear.bias = whole
    mixture.up, mixture.down = mixture.down, mixture.up
    with pytest.raises(ValueError, match="4 experts"):
        mixture.native(torch.randn(3, 6), ids, weights)


@needs_library
def test_kernel(native: Native) -> None:
    kernel = NativeExperts()
    up = LinearSpec("up", 40, (24,) * 6, False, "none", (), (), 3)
    assert kernel.can_run(PLAIN, up, CPU, "silu") is None
    assert kernel.can_run(PLAIN, up, CPU, "swiglu_clamped") is None
    params = {"weight": torch.randn(144, 40)}
    packed = kernel.pack(PLAIN, params, up, torch.bfloat16)
    assert not params, "the original is given up"
    assert packed.nbytes == 6 * 32 * 40 * 2


def test_reasons_for_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    one = LinearSpec("up", 40, (24,) * 3, False, "none", (), (), 3)
    fmt: Any = Rounded(8, 48, "float")
    other: Any = PlainFormat()
    other.name = "fp8"
    kernel = NativeExperts()
    if kernel.native is not None:
        assert "not xielu" in str(kernel.can_run(PLAIN, one, CPU, "xielu"))
        assert "not swiglu_clamped" in str(kernel.can_run(PLAIN, one, CPU, "swiglu_clamped")), "it has one part only"
        assert "groups of 16" in str(kernel.can_run(fmt, one, CPU, None))
        assert "not fp8" in str(kernel.can_run(other, one, CPU, None))
    monkeypatch.setattr("lmkit_platform_cpu.experts.load", lambda: None)
    assert "no compiler" in str(NativeExperts().can_run(PLAIN, one, CPU, "silu"))
