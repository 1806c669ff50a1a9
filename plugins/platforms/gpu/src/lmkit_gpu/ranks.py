"""Collectives of ranks that have a device each, through torch.distributed: NCCL, and RCCL, which torch calls so too."""

from __future__ import annotations

from typing import Any

import torch
from lmkit.api import ConfigError
from torch import Tensor, distributed

# The newer of two names, of which torch 2.13 calls the older one deprecated.
gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


class DeviceRanks:
    """Queued on the devices like other work: the host waits for nothing, and graphs may hold them.

    Sums are those of the backend, in the dtype of what is summed. All ranks get the same bits.
    """

    def __init__(self, backend: str, rank: int, size: int, init_method: str) -> None:
        """`init_method` as torch.distributed.init_process_group takes it: a file of this host, or "tcp://host:port"."""
        if not init_method:
            raise ValueError(f"{size} ranks need an init_method, to find each other")
        self.rank, self.size = rank, size
        if distributed.is_initialized():
            raise ConfigError("ranks of torch.distributed are of one group here", fix="--tp or --pp alone")
        distributed.init_process_group(backend, init_method=init_method, rank=rank, world_size=size)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, [...], in a tensor of its own."""
        total = x.contiguous().clone()
        distributed.all_reduce(total)
        return total

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The parts of all ranks one after another along `dim`."""
        parts = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        gather(parts, x.contiguous())
        if dim % x.dim() == 0:
            return parts
        return torch.cat(parts.split(x.shape[0]), dim)

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        out = x.contiguous().clone()
        distributed.broadcast(out, src)
        return out

    def send(self, x: Tensor, dst: int) -> None:
        distributed.send(x.contiguous(), dst)

    def receive(self, out: Tensor, src: int) -> Tensor:
        distributed.recv(out, src)
        return out
