"""NVIDIA GPUs as a platform."""

from __future__ import annotations

from lmkit_gpu import GpuPlatform


class CudaPlatform(GpuPlatform):
    name = "cuda"

    def env(self) -> dict[str, str]:
        """Devices have the numbers of the probe: NVML's order is that of the bus, CUDA's own is by speed."""
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
