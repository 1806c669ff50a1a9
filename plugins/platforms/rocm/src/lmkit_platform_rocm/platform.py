"""AMD GPUs as a platform: torch's builds for ROCm reach them through torch.cuda."""

from __future__ import annotations

from lmkit_gpu import GpuPlatform


class RocmPlatform(GpuPlatform):
    name = "rocm"
