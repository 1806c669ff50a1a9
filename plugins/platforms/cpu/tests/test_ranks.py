"""Collectives of processes: sums and parts equal to what is computed in one; of the native ones bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lmkit_platform_cpu.native import load
from lmkit_platform_cpu.ranks import CAPACITY, open_collectives
from torch import Tensor

SIZE = 3
SHAPES = [(1,), (7, 33), (64, 100), (0, 4), (CAPACITY // 4 + 5,)]  # the last goes in two pieces
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def summed(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """In float32, in the order of the ranks, rounded once."""
    total = values(0, shape, dtype).float()
    for rank in range(1, SIZE):
        total = total + values(rank, shape, dtype).float()
    return total.to(dtype)


def work(rank: int, path: str, with_native: bool) -> None:
    """One rank; its exit status says whether all was right."""
    native = load() if with_native else None
    if native is not None:
        native.start(1)
    group = open_collectives(native, rank, SIZE, f"file://{path}")
    for _ in range(2):
        for dtype in DTYPES:
            for shape in SHAPES:
                found, expected = group.all_reduce(values(rank, shape, dtype)), summed(shape, dtype)
                assert (
                    torch.equal(found, expected)
                    if with_native
                    else torch.allclose(found, expected, rtol=0.01, atol=1e-5)
                )
    for dim in (0, 1, -1):
        parts = [values(r, (5, 3, 4), torch.float32) for r in range(SIZE)]
        assert torch.equal(group.all_gather(parts[rank], dim), torch.cat(parts, dim))
    assert torch.equal(group.broadcast(values(rank, (4,), torch.float32), 1), values(1, (4,), torch.float32))
    passed_on(group, rank)
    if native is not None:
        recorded(native, group, rank)


def passed_on(group: object, rank: int) -> None:
    """From each to the next, many times: none overwrites what was not taken."""
    for n in range(20):
        for shape in SHAPES:
            x = values(n, shape, torch.bfloat16)
            if rank > 0:
                found = group.receive(torch.empty_like(x), rank - 1)  # type: ignore[attr-defined]
                assert torch.equal(found, x)
            if rank < SIZE - 1:
                group.send(x, rank + 1)  # type: ignore[attr-defined]


def recorded(native: object, group: object, rank: int) -> None:
    """On a tape: the same operator over the same memory, with other numbers in it each time."""
    x = torch.zeros(40)
    with native.capture() as tape:  # type: ignore[attr-defined]
        if rank > 0:
            group.receive(x, rank - 1)  # type: ignore[attr-defined]
        if rank < SIZE - 1:
            group.send(x, rank + 1)  # type: ignore[attr-defined]
    for n in range(50):
        x.fill_(n if rank == 0 else -1)
        tape.run()
        assert torch.equal(x, torch.full((40,), float(n)))
    with native.capture() as tape:  # type: ignore[attr-defined]
        out = group.all_reduce(x)  # type: ignore[attr-defined]
    for n in range(50):
        x.fill_(rank + n)
        tape.run()
        assert torch.equal(out, torch.full((40,), float(sum(r + n for r in range(SIZE)))))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("with_native", [True, False], ids=["native", "gloo"])
def test_ranks(tmp_path: Path, with_native: bool) -> None:
    if with_native and load() is None:
        pytest.skip("no native kernels here")
    more = [str(tmp_path / "memory"), "native" if with_native else ""]
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank), *more]) for rank in range(SIZE)]
    assert [process.wait(300) for process in ranks] == [0] * SIZE


def test_ranks_need_a_place_to_meet() -> None:
    with pytest.raises(ValueError, match="init_method"):
        open_collectives(None, 0, 2, "")


if __name__ == "__main__":
    work(int(sys.argv[1]), sys.argv[2], bool(sys.argv[3]))
