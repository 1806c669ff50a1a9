"""GpuPlatform: a platform whose work is queued on a device of torch. torch is imported in the worker only."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from lmkit.api import Collectives, ConfigError, DeviceInfo, ModelInfo, NullCollectives, StepLimits

from lmkit_gpu.budget import GIB, headroom
from lmkit_gpu.caches import kernel_caches
from lmkit_gpu.graphs import GpuGraphs
from lmkit_gpu.ring import PinnedRing
from lmkit_gpu.runtime import Runtime, TorchRuntime

if TYPE_CHECKING:
    import torch
    from lmkit.api import EngineConfig
    from torch import Tensor

    from lmkit_gpu.runtime import DeviceEvent

COPIES = 4  # of what is pushed: two steps are in flight, and two planners may push the same


class TwinBuffer:
    """Host memory with a twin on the device. What is pushed goes through one of several pinned copies, so that the host
    side may be written again at once: while one step runs, the next is built."""

    __slots__ = ("_copies", "_num", "_parts", "_turn", "device", "host")

    def __init__(self, runtime: Runtime, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        import torch

        self.host, self.device = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype, device=device)
        self._copies = [(runtime.pinned(shape, dtype), runtime.event()) for _ in range(COPIES)]
        self._turn = 0
        self._num = -1
        self._parts: list[tuple[Tensor, ...]] = []  # views of so many rows, one tuple for each copy

    def push(self, n: int) -> Tensor:
        """Asynchronous; it waits only where as many pushes as there are copies are still on their way."""
        if n != self._num:
            self._num = n
            self._parts = [(self.host[:n], staged[:n], self.device[:n]) for staged, _ in self._copies]
        (host, staged, device), sent = self._parts[self._turn], self._copies[self._turn][1]
        self._turn = (self._turn + 1) % COPIES
        if not sent.query():
            sent.synchronize()
        staged.copy_(host)
        device.copy_(staged, non_blocking=True)
        sent.record()
        return device


class QueueEvent:
    """A point in the queue of the device."""

    def __init__(self, event: DeviceEvent) -> None:
        self._event = event

    def record(self) -> None:
        self._event.record()

    def query(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()


class GpuPlatform:
    """Subclasses say their `name`, and in `env` what their worker processes need."""

    name: str
    device_type = "cuda"  # AMD's are called so by torch, too

    def __init__(self, runtime: Runtime | None = None) -> None:
        self.runtime = runtime or TorchRuntime()
        self._device: torch.device | None = None
        self._ring: PinnedRing | None = None  # while weights are loaded

    def env(self) -> dict[str, str]:
        return {}

    def worker_env(self, config: EngineConfig, rank: int) -> dict[str, str]:
        """One host thread is enough: the work is on the device. What compiles kernels keeps them in one folder.

        Raises ConfigError for several engines: each would take the first device.
        """
        if config.parallel.dp > 1:
            each = "one `lmkit serve` for each device, told by CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES which"
            raise ConfigError(f"--dp {config.parallel.dp}: engines do not share out the GPUs of a host", fix=each)
        return {
            "OMP_NUM_THREADS": str(config.parallel.threads or 1),
            "TOKENIZERS_PARALLELISM": "false",
            "TRITON_DEFAULT_FP_FUSION": os.environ.get("TRITON_DEFAULT_FP_FUSION", "1"),  # not Triton 3.10's
            **kernel_caches(os.environ),
            **self.env(),
        }

    def bind(self, rank: int, threads: int | None = None) -> torch.device:
        self._device = self.runtime.select(rank)
        return self._device

    def free_memory(self) -> int:
        """Without the headroom. What was needed for loading alone is given back."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        free, total = self.runtime.memory()
        return max(0, free - headroom(total))

    def measure(self, work: Callable[[], None]) -> int:
        """What `work` leaves behind in cycles of objects is gone afterwards."""
        return self.runtime.peak(work)

    def defaults(self, model: ModelInfo, device: DeviceInfo) -> dict[str, object]:
        """Long steps, and many rows, keep a large device busy; the next step is prepared while one runs."""
        large = device.total_memory >= 40 * GIB
        return {
            "sched.max_tokens": 8192 if large else 2048, "sched.max_rows": 256 if large else 64, "parallel.depth": 2
        }  # fmt: skip

    def upload(self, source: Tensor) -> Tensor:
        assert self._device is not None, "bind comes first"
        self._ring = self._ring or PinnedRing(self.runtime, self._device)
        return self._ring.upload(source)

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> TwinBuffer:
        assert self._device is not None, "bind comes first"
        return TwinBuffer(self.runtime, shape, dtype, self._device)

    def event(self) -> QueueEvent:
        return QueueEvent(self.runtime.event())

    def graphs(self, limits: StepLimits) -> GpuGraphs:
        return GpuGraphs(self.runtime, min(limits.max_rows, limits.max_tokens))

    def collectives(self, rank: int, size: int, init_method: str = "") -> Collectives:
        if size == 1:
            return NullCollectives()
        from lmkit_gpu.ranks import DeviceRanks

        return DeviceRanks(self.runtime.collectives, rank, size, init_method)
