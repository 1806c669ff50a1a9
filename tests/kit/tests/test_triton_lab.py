"""The laboratory finds what it is there to find, and computes bfloat16 as torch does."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from lmkit_testing.triton_lab import Fault, lab
from lmkit_testing.triton_numbers import interpreted, right_numbers

kernels = interpreted("lmkit_testing.lab_kernels")
N = 64


def twice(n: int = 256, stride: int = 1, extra: int = 0, overlap: int = 0, **how):
    x, y = torch.randn(n * stride), torch.empty(n * stride)
    view = y[::stride]
    with lab(**how) as seen:
        kernels.twice[(-(-n // N),)](x[::stride], view, n, stride, N, extra, overlap)
    assert torch.equal(view, x[::stride] * 2)
    return seen


def test_what_is_right_passes_and_is_counted() -> None:
    seen = twice(unwritten=("y",))
    assert (seen.launches, seen.efficiency) == (1, 1.0)
    assert seen.moved <= 2 * 256 * 4 + 2 * 32  # tensors need not begin with a sector


def test_any_order_of_programs() -> None:
    twice(shuffle=3)


def test_strided_accesses_are_dear() -> None:
    assert twice(stride=16, unwritten=("y",)).efficiency == pytest.approx(1 / 8)


def test_out_of_bounds() -> None:
    with pytest.raises(Fault, match=r"out of bounds: program 3 reads 3 elements .* x\[250\]"):
        twice(n=250, extra=3)


def test_two_programs_that_write_the_same() -> None:
    with pytest.raises(Fault, match="race: program 1 writes y where program 0 writes"):
        twice(n=250, overlap=1)


@pytest.mark.parametrize("shuffle", [None, 1])
def test_a_program_that_reads_what_another_writes(shuffle: int | None) -> None:
    with pytest.raises(Fault, match="race"), lab(shuffle=shuffle):
        kernels.cross[(2,)](torch.zeros(2 * N), N)


def test_unwritten_outputs() -> None:
    with pytest.raises(Fault, match=r"y: 4 bytes were left unwritten, first at \[63\]"), lab(unwritten=("y",)):
        kernels.copy[(1,)](torch.zeros(N), torch.empty(N), N - 1, N)
    with pytest.raises(Fault, match="reads x where nobody wrote"), lab(unwritten=("x",)):
        kernels.copy[(1,)](torch.zeros(N), torch.empty(N), N, N)


OPERATIONS = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "max": torch.maximum,
    "where": torch.minimum,
    "neg": lambda x, y: -x,
    "float": lambda x, y: x + y,
    "half": lambda x, y: x.abs() + x.half().bfloat16(),
    "largest": lambda x, y: x.max().expand(N),
    "sum": lambda x, y: x.float().sum().bfloat16().expand(N),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_bfloat16_is_torchs(name: str) -> None:
    a, b = torch.randn(2, N, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.empty_like(a)
    with lab(unwritten=("out",)):
        kernels.both[(1,)](a, b, out, name, N)
    assert torch.equal(out, OPERATIONS[name](a, b))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_is_torchs(dtype: torch.dtype) -> None:
    x = torch.cat((torch.randn(N - 2) * 3, torch.tensor([0.4993, 1.999])))
    small, back = torch.empty(N, dtype=dtype), torch.empty(N)
    with lab(unwritten=("y",)):
        kernels.convert[(1,)](x, small, N)
        kernels.convert[(1,)](small, back, N)
    assert torch.equal(small.float(), x.to(dtype).float())
    assert torch.equal(back, small.float())


def test_products_of_bfloat16() -> None:
    a, b, out = torch.randn(16, 32).bfloat16(), torch.randn(32, 16).bfloat16(), torch.empty(16, 16)
    with lab(unwritten=("out",)):
        kernels.product[(1,)](a, b, out, 16, 16, 32)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def test_nothing_is_left_patched() -> None:
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    before = InterpreterBuilder.binary_op, InterpreterBuilder.create_masked_load, GridExecutor.__call__
    twice()
    assert (InterpreterBuilder.binary_op, InterpreterBuilder.create_masked_load, GridExecutor.__call__) == before


def test_numbers_that_overflow() -> None:
    """Integers of 32 bits that wrap are no addresses; what fits is right to the last one."""
    kernels, out = interpreted("lmkit_testing.lab_kernels"), torch.empty(4, dtype=torch.int32)
    with right_numbers():
        kernels.scaled[(1,)](out, 2**31 // 4, 4)
        assert out.tolist() == [n * (2**31 // 4) for n in range(4)]
        with pytest.raises(Exception, match="int32 overflow detected for operation mul"):
            kernels.scaled[(1,)](out, 2**31 // 3 + 1, 4)


def test_functions_of_kernels_are_patched_once() -> None:
    """In a kernel's launch alone: after it, and after one that failed, the language is what it was."""
    import triton.language as tl

    kernels, x, before = interpreted("lmkit_testing.lab_kernels"), torch.arange(4.0), dict(vars(tl.core.tensor))
    out = torch.empty(4)
    with right_numbers():
        for _ in range(2):
            kernels.halved[(2,)](x, out, 4)
            assert out.tolist() == [0.0, 0.5, 1.0, 1.5]
            with pytest.raises(TypeError):
                kernels.halved[(2,)](x)
            assert dict(vars(tl.core.tensor)) == before
