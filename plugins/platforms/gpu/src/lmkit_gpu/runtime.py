"""The one place where devices, pinned memory, events and graphs come from."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from lmkit.api import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class DeviceEvent(Protocol):
    """As torch's events."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class Runtime(Protocol):
    """A kind of device as GpuPlatform uses it."""

    device_type: str  # of torch
    collectives: str  # of torch.distributed, by which ranks with such devices talk

    def select(self, index: int) -> torch.device:
        """The device, with a queue of our own for the calling thread."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros on the host, from which the device copies without the host's help."""
        ...

    def event(self) -> DeviceEvent: ...

    def capture(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Records what `work` launches, without running it: how to replay it, and the tensor that it then writes."""
        ...

    def memory(self) -> tuple[int, int]:
        """Bytes of the selected device: what can still be allocated, and all there are."""
        ...

    def peak(self, work: Callable[[], None]) -> int:
        """Runs `work`: bytes that were allocated at most, beyond what was before. All of it is free again then."""
        ...


class TorchRuntime:
    """torch's "cuda" devices: NVIDIA's, and AMD's where torch is built for ROCm."""

    device_type = "cuda"
    collectives = "nccl"

    def __init__(self) -> None:
        self._pool: Any = None  # one for all graphs: they never run at the same time

    def select(self, index: int) -> torch.device:
        """The legacy default stream would wait for others and be waited for, so work goes to a stream of its own."""
        import torch

        if index >= (found := torch.cuda.device_count()):
            raise ConfigError(f"rank {index} has no device: there are {found}", fix=f"--tp {max(1, found)}")
        device = torch.device(self.device_type, index)
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))
        return device

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        import torch

        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def event(self) -> DeviceEvent:
        import torch

        return torch.cuda.Event()

    def capture(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        import torch

        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # what other threads do, as those of NCCL that look for errors, does not end it
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()
        return graph.replay, result

    def memory(self) -> tuple[int, int]:
        """What torch has reserved and does not use counts as free."""
        import torch

        free, total = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated(), total

    def peak(self, work: Callable[[], None]) -> int:
        """What the allocator reserved counts, gaps included. What libraries took for themselves is no longer free, so
        `memory` knows it."""
        import torch

        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_reserved()
        gc.collect()
        torch.cuda.empty_cache()
        return most - before
