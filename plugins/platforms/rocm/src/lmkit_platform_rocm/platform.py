"""AMD GPUs as a platform: torch reaches them through torch.cuda. torch is imported in the worker only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkit.api import DeviceInfo, ModelInfo, NullCollectives, NullGraphs, StepLimits

if TYPE_CHECKING:
    import torch
    from lmkit.api import EngineConfig
    from torch import Tensor

GIB = 1 << 30


class TwinBuffer:
    """Pinned host memory with a twin on the device."""

    __slots__ = ("device", "host")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        import torch

        self.host = torch.zeros(shape, dtype=dtype, pin_memory=True)
        self.device = torch.zeros(shape, dtype=dtype, device="cuda")

    def push(self, n: int) -> Tensor:
        """Asynchronous: the host side must not be written again before the step's event has passed."""
        self.device[:n].copy_(self.host[:n], non_blocking=True)
        return self.device[:n]


class StreamEvent:
    """A point in the current stream."""

    def __init__(self) -> None:
        import torch

        self._event = torch.cuda.Event()

    def record(self) -> None:
        self._event.record()

    def query(self) -> bool:
        done: bool = self._event.query()
        return done

    def wait(self) -> None:
        self._event.synchronize()


class RocmPlatform:
    name = "rocm"
    device_type = "cuda"

    def worker_env(self, config: EngineConfig, rank: int) -> dict[str, str]:
        """One host thread is enough: the work is on the device."""
        return {"OMP_NUM_THREADS": str(config.parallel.threads or 1), "TOKENIZERS_PARALLELISM": "false"}

    def bind(self, rank: int, threads: int | None = None) -> torch.device:
        import torch

        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        return device

    def free_memory(self) -> int:
        """Free on the device, and what torch has reserved and does not use."""
        import torch

        free, _ = torch.cuda.mem_get_info()
        return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())

    def defaults(self, model: ModelInfo, device: DeviceInfo) -> dict[str, object]:
        """Long steps keep a large device busy."""
        return {"sched.max_tokens": 8192 if device.total_memory >= 40 * GIB else 2048}

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> TwinBuffer:
        return TwinBuffer(shape, dtype)

    def event(self) -> StreamEvent:
        return StreamEvent()

    def graphs(self, limits: StepLimits) -> NullGraphs:
        return NullGraphs()

    def collectives(self, rank: int, size: int) -> NullCollectives:
        if size != 1:
            raise ValueError(f"the rocm platform runs one rank, not {size}")
        return NullCollectives()
