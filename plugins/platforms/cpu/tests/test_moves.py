"""Operators of torch that a tape holds, against torch; and that steps of recurrent models are recorded with them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit_platform_cpu.graphs import Memory, Recorder
from lmkit_platform_cpu.moves import MOVES
from lmkit_platform_cpu.native import load
from torch import Tensor

native = load()
if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)


aten = torch.ops.aten
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ONE = [aten.neg.default, aten.exp.default, aten.sigmoid.default, aten.softplus.default, aten.silu.default]


@st.composite
def tensors(draw: st.DrawFn, shape: tuple[int, ...]) -> Tensor:
    """With gaps between rows, heads or both, or none."""
    gap = draw(st.integers(0, 3))
    whole = torch.randn(*shape[:-1], shape[-1] + gap, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return (whole * 8)[..., : shape[-1]].to(draw(st.sampled_from(DTYPES)))


SHAPES = st.lists(st.integers(1, 20), min_size=1, max_size=3).map(tuple)


def close(got: Tensor | None, want: Tensor) -> None:
    assert got is not None
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    unit = torch.finfo(want.dtype).eps * (4 if want.dtype == torch.float32 else 1)
    torch.testing.assert_close(got.double(), want.double(), rtol=unit, atol=unit, equal_nan=True)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_one_operand(data: st.DataObject) -> None:
    x = data.draw(SHAPES.flatmap(tensors))
    op = data.draw(st.sampled_from(ONE))
    got = MOVES[op](x)
    if op == aten.silu.default and got is None:
        assert not x.is_contiguous()
    else:
        close(got, op(x))
    close(MOVES[aten.clamp.default](x, 0.5, 2.0), x.clamp(0.5, 2.0))
    close(MOVES[aten.clamp.default](x, None, -1.0), x.clamp(None, -1.0))
    close(MOVES[aten.mul.Tensor](x, 0.3), x * 0.3)
    dtype = data.draw(st.sampled_from(DTYPES))
    close(MOVES[aten._to_copy.default](x, dtype=dtype), x.to(dtype))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_two_operands_of_any_shapes(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    kept = data.draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    other = tuple(size if keep else 1 for size, keep in zip(shape, kept, strict=True))
    x, y = data.draw(tensors(shape)), data.draw(tensors(other[data.draw(st.integers(0, len(other) - 1)) :]))
    x, y = (x, y) if data.draw(st.booleans()) else (y, x)
    for op in (aten.mul.Tensor, aten.add.Tensor):
        got = MOVES[op](x, y)
        if got is not None:  # of three axes some lie so that no two are one
            close(got, op(x, y))
        else:
            assert len(shape) == 3


def test_what_is_not_finite_stays_so() -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 100.0, -100.0, 0.0])
    for op in ONE:
        close(MOVES[op](x), op(x))
    close(MOVES[aten.clamp.default](x, -1, 1), x.clamp(-1, 1))


def test_what_the_kernel_does_not_cover_is_left_to_torch() -> None:
    x = torch.randn(2, 3)
    assert MOVES[aten.mul.Tensor](x.double(), x.double()) is None
    assert MOVES[aten.add.Tensor](x, x, alpha=2) is None
    assert MOVES[aten.softplus.default](x, 2, 20) is None
    assert MOVES[aten._to_copy.default](x, dtype=torch.int64) is None


def test_what_looks_like_a_view_and_copies_is_recorded() -> None:
    x = torch.randn(4, 6, dtype=torch.bfloat16)
    with torch.inference_mode(), native.capture() as tape, Recorder(Memory()):
        y, z = x.to(torch.float32), x[:, :3].reshape(12)
        same = x.reshape(24)
    assert len(tape) == 2
    assert same.data_ptr() == x.data_ptr()
    x.copy_(torch.arange(24).view(4, 6))
    tape.run()
    assert torch.equal(y, x.float())
    assert torch.equal(z, x[:, :3].reshape(12))
