"""Collectives of the ranks on one host: native, in memory that all of them see; between hosts, or without native
kernels, those of torch.distributed (gloo)."""

from __future__ import annotations

import atexit
import mmap
import os
from ctypes import addressof, c_char, c_int32, c_int64, c_void_p
from typing import Any

import torch
from lmkit.api import Collectives, ConfigError
from torch import Tensor

from lmkit_platform_cpu.native import Args, Native
from lmkit_platform_cpu.rowops import CHUNK, DTYPES

FLAG_BYTES = 64  # as in csrc/ranks.h
CHUNK_BYTES = 4 * CHUNK  # of what is passed on
FLAGS = 3  # of each rank
CAPACITY = 4 << 20  # bytes of a buffer: larger tensors go in pieces
FILE = "file://"


class RanksArgs(Args):
    _fields_ = [
        *((name, c_void_p) for name in ("shared", "rounds", "x", "out")),
        *((name, c_int64) for name in ("rank", "size", "first", "capacity", "values", "step", "inner")),
        ("dtype", c_int32),
        ("sender", c_int64),
    ]


def open_collectives(native: Native | None, rank: int, size: int, init_method: str) -> Collectives:
    """`init_method` as torch.distributed.init_process_group takes it: a file of this host, or "tcp://host:port"."""
    if not init_method:
        raise ValueError(f"{size} ranks need an init_method, to find each other")
    if native is not None and init_method.startswith(FILE):
        return SharedMemory(native, rank, size, init_method.removeprefix(FILE))
    return Gloo(rank, size, init_method)


class SharedMemory:
    """All ranks map one file, which is as large as the last of them left it; what is in it begins as zeros.

    Tensors are summed in float32 in the order of the ranks and rounded once: all ranks get the same bits. Recorded on
    tapes like any other operator. A rank that waits for one that is gone waits for ever: whoever started them ends it.
    """

    def __init__(self, native: Native, rank: int, size: int, path: str) -> None:
        self.native, self.rank, self.size = native, rank, size
        self.first = -(-size * FLAGS * FLAG_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        length = self.first + size * 2 * 2 * CAPACITY  # pages that nobody touches are not taken
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.fstat(fd).st_size < length:
                os.ftruncate(fd, length)
            self._memory = mmap.mmap(fd, length)
        finally:
            os.close(fd)
        self._address = addressof(c_char.from_buffer(self._memory))
        self._rounds, self._sent, self._received = (c_int64(0) for _ in range(3))

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, [...] of float32, bfloat16 or float16, in a tensor of its own."""
        x = x.contiguous()
        out = torch.empty_like(x)
        width, total = x.element_size(), x.numel()
        for begin in range(0, total, CAPACITY // width):
            values = min(total - begin, CAPACITY // width)
            args = self._args(x, out, begin * width, begin * width, values, CHUNK)
            args.dtype = DTYPES[x.dtype]
            self.native.run("all_reduce", args)
        return out

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The parts of all ranks one after another along `dim`."""
        x, dim = x.contiguous(), dim % x.dim()
        shape = list(x.shape)
        shape[dim] *= self.size
        out = x.new_empty(shape)
        inner = x[(0,) * dim].nbytes
        outer = x.nbytes // inner if inner else 0
        if inner > CAPACITY:
            raise ValueError(f"a part of {inner} bytes is more than the {CAPACITY} that ranks pass on at once")
        for begin in range(0, outer, CAPACITY // inner if inner else 1):
            values = min(outer - begin, CAPACITY // inner)
            args = self._args(x, out, begin * inner, begin * inner * self.size, values, max(1, CHUNK // inner))
            args.inner = inner
            self.native.run("all_gather", args)
        return out

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        return self.all_gather(x.unsqueeze(0), 0)[src]

    def send(self, x: Tensor, dst: int) -> None:
        assert dst == self.rank + 1, "ranks send to the next one"
        self._pass_on("send", x.contiguous(), self.rank, self._sent)

    def receive(self, out: Tensor, src: int) -> Tensor:
        assert src == self.rank - 1, "ranks receive of the one before"
        self._pass_on("receive", out, src, self._received)
        return out

    def _pass_on(self, name: str, x: Tensor, sender: int, rounds: c_int64) -> None:
        for begin in range(0, x.nbytes, CAPACITY):
            args = self._args(x, x, begin, begin, min(x.nbytes - begin, CAPACITY), CHUNK_BYTES)
            args.sender, args.rounds = sender, addressof(rounds)
            args.chunks[0], args.chunks[1], args.chunks[2] = 1, args.chunks[0], 1
            self.native.run(name, args)

    def _args(self, x: Tensor, out: Tensor, x_at: int, out_at: int, values: int, step: int) -> RanksArgs:
        args = RanksArgs()
        args.shared, args.rounds = self._address, addressof(self._rounds)
        args.x, args.out = x.data_ptr() + x_at, out.data_ptr() + out_at
        args.rank, args.size, args.first, args.capacity = self.rank, self.size, self.first, CAPACITY
        args.values, args.step = values, step
        args.chunks[0] = args.chunks[2] = -(-values // step)
        args.chunks[1] = 1
        return args


class Gloo:
    """torch.distributed on the CPU."""

    def __init__(self, rank: int, size: int, init_method: str) -> None:
        from torch import distributed

        self.rank, self.size = rank, size
        self._distributed: Any = distributed
        if distributed.is_initialized():
            raise ConfigError("ranks of torch.distributed are of one group here", fix="--tp or --pp alone")
        distributed.init_process_group("gloo", init_method=init_method, rank=rank, world_size=size)
        atexit.register(_leave)  # else its threads may end the process with an abort

    def all_reduce(self, x: Tensor) -> Tensor:
        """Summed in float32: gloo itself would round after each addition."""
        total = x.float() if x.dtype != torch.float32 else x.clone()
        self._distributed.all_reduce(total)
        return total.to(x.dtype)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._distributed.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim)

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        out = x.clone()
        self._distributed.broadcast(out, src)
        return out

    def send(self, x: Tensor, dst: int) -> None:
        self._distributed.send(x.contiguous(), dst)

    def receive(self, out: Tensor, src: int) -> Tensor:
        self._distributed.recv(out, src)
        return out


def _leave() -> None:
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()
