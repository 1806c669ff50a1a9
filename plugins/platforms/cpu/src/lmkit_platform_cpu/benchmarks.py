"""The limits of the machine: reading and multiplying by native code that does nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_int32, c_int64, c_void_p
from functools import partial

import torch
from lmkit.api import BenchmarkCase
from torch import Tensor

from lmkit_platform_cpu.native import Args, Native, load
from lmkit_platform_cpu.packed import huge

READ_BYTES = 512 << 20  # far beyond every cache
READ_CHUNK = 1 << 20
CHUNKS, ROUNDS = 64, 1 << 14  # of multiplications: some milliseconds
LANES = 16  # floats of the widest vector
DTYPES = {"float32": 0, "bfloat16": 1, "int8": 3}


class ReadArgs(Args):
    _fields_ = [("source", c_void_p), ("sums", c_void_p), ("step", c_int64)]


class MultiplyArgs(Args):
    _fields_ = [("sums", c_void_p), ("rounds", c_int64), ("flops", c_int64), ("dtype", c_int32)]


def cases() -> Iterator[BenchmarkCase]:
    """None without the native library. bfloat16 and int8 only where the processor multiplies them."""
    native = load()
    if native is None:
        return
    data = huge(READ_BYTES).fill_(1)
    sums = torch.empty(READ_BYTES // READ_CHUNK, dtype=torch.int64)
    args = ReadArgs(source=data.data_ptr(), sums=sums.data_ptr(), step=READ_CHUNK // 8)
    args.chunks[0] = len(sums)
    yield BenchmarkCase(
        name=f"read {READ_BYTES >> 20} MiB, native", run=partial(_run, native, "read", args, data, sums),
        bytes=READ_BYTES, limit="read",
    )  # fmt: skip
    del data, args
    yield from multiplications(native)


def multiplications(native: Native) -> Iterator[BenchmarkCase]:
    """One for each type that the instruction set multiplies."""
    sums = torch.empty(CHUNKS * LANES)
    for name, number in DTYPES.items():
        args = MultiplyArgs(sums=sums.data_ptr(), rounds=ROUNDS, dtype=number)
        args.chunks[0] = CHUNKS
        native.run("multiply", args)
        if args.flops:
            yield BenchmarkCase(
                name=f"multiply in registers, {name}", run=partial(_run, native, "multiply", args, sums),
                bytes=0, flops=CHUNKS * args.flops, dtype=name, limit="flops",
            )  # fmt: skip


def _run(native: Native, name: str, args: Args, *memory: Tensor) -> None:
    """`memory` is what the arguments point to: it stays as long as the case does."""
    native.run(name, args)
