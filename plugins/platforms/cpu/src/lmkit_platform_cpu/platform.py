"""The CPU as a platform. torch is imported in the worker only: the parent asks `worker_env` and `defaults` without."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from lmkit.api import (
    Collectives,
    ConfigError,
    DeviceInfo,
    Graphs,
    ModelInfo,
    NullCollectives,
    NullEvent,
    NullGraphs,
    StepLimits,
)

from lmkit_platform_cpu.native import FIX, MISSING, Native, cores, load
from lmkit_platform_cpu.probe import memory, physical_cores, reserve

if TYPE_CHECKING:
    import torch
    from lmkit.api import EngineConfig
    from torch import Tensor


log = logging.getLogger("lmkit.platform.cpu")

RANKS_HERE = "LOCAL_WORLD_SIZE"  # set, as by torch's own launcher, where some of the ranks are on other hosts
OWN_PROCESS = "_LMKIT_CPU_OWN_PROCESS"  # set by worker_env: the process is for an engine alone, one of so many


class HostBuffer:
    """One tensor is both host and device side."""

    __slots__ = ("device", "host")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        import torch

        self.host = self.device = torch.zeros(shape, dtype=dtype)

    def push(self, n: int) -> Tensor:
        return self.device[:n]


def trim() -> None:
    """Gives freed memory back to the system, where the allocator (glibc's) keeps it: loading frees hundreds of MiB."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if give_back is not None:
        give_back(0)


class CpuPlatform:
    name = "cpu"
    device_type = "cpu"

    def __init__(self, isa: str = "auto") -> None:
        self._isa, self._num_ranks = isa, 1

    @property
    def native(self) -> Native | None:
        """The library of native kernels, None where it was not built."""
        return load()

    def worker_env(self, config: EngineConfig, rank: int) -> dict[str, str]:
        """One compute thread per physical core, unless the user said otherwise.

        Waiting threads sleep. Spinning ones, the default, make every operator wait for a time slice of the system as
        soon as anything else (the server, another program) wants a core: 20 to 40 times slower on two busy cores.
        """
        dp = config.parallel.dp
        threads = config.parallel.threads or _asked_threads() or max(1, physical_cores() // (dp * config.parallel.tp))
        wait = os.environ.get("OMP_WAIT_POLICY", "passive")
        return {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": wait,
            OWN_PROCESS: str(dp),
        }

    def bind(self, rank: int, threads: int | None = None) -> torch.device:
        """Threads as the user or the environment says, else one per physical core: torch's pool and our own, of which
        only one works at a time.

        In a process of its own denormals count as zero: they are slow. A process that belongs to the user keeps its
        arithmetic.
        """
        import numpy
        import torch

        threads = threads or _asked_threads() or physical_cores()
        torch.set_num_threads(threads)
        if self.native is not None:
            self.native.set_isa(self._isa)
            self.native.start(threads, cores())
        elif self._isa != "auto":
            raise ConfigError(f"instruction set {self._isa!r} was asked for, and {MISSING}", fix=FIX)
        else:
            log.warning("%s. %s", MISSING, FIX)
        if os.environ.get(OWN_PROCESS):
            for name in ("float16", "float32", "float64", "longdouble"):
                numpy.finfo(name)  # measured once, and with a warning each where it finds denormals flushed
            torch.set_flush_denormal(True)
        return torch.device("cpu")

    def free_memory(self) -> int:
        """What is free now, without the part left to the rest of the host; of several ranks and engines on it each
        takes its share. Freed memory goes back to the system."""
        trim()
        total, free = memory()
        ranks = min(self._num_ranks, int(os.environ.get(RANKS_HERE) or self._num_ranks))
        return max(0, free - reserve(total)) // (ranks * int(os.environ.get(OWN_PROCESS, "1")))

    def measure(self, work: Callable[[], None]) -> None:
        """What a step takes is estimated: memory of the host is taken as it is used, and shared with others."""

    def defaults(self, model: ModelInfo, device: DeviceInfo) -> dict[str, object]:
        """Steps short enough that decodes beside a prefill chunk are not held up for long."""
        return {"sched.max_tokens": 512 if device.num_cores <= 8 else 2048}

    def upload(self, source: Tensor) -> Tensor:
        return source

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> HostBuffer:
        return HostBuffer(shape, dtype)

    def event(self) -> NullEvent:
        return NullEvent()

    def graphs(self, limits: StepLimits) -> Graphs:
        if self.native is None:
            return NullGraphs()
        from lmkit_platform_cpu.graphs import CpuGraphs

        return CpuGraphs(self.native, limits.max_rows)

    def collectives(self, rank: int, size: int, init_method: str = "") -> Collectives:
        """Native ones on one host, gloo between hosts."""
        self._num_ranks *= size
        if size == 1:
            return NullCollectives()
        from lmkit_platform_cpu.ranks import open_collectives

        return open_collectives(self.native, rank, size, init_method)


def _asked_threads() -> int:
    """Threads that OMP_NUM_THREADS asks for; 0 = it does not."""
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(threads) if threads.isdigit() else 0
