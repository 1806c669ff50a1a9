"""What platforms of GPUs share. Light: torch is imported in the worker only."""

from lmkit_gpu.platform import GpuPlatform
from lmkit_gpu.runtime import Runtime, TorchRuntime

__all__ = ["GpuPlatform", "Runtime", "TorchRuntime"]
