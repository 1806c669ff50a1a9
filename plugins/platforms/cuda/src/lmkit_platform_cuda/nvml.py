"""What NVML says of GPUs and of their MIG instances: by ctypes, without torch and without a device context."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

LIBRARIES = ("libnvidia-ml.so.1", "nvml.dll")
NOT_SUPPORTED, NOT_FOUND, INSUFFICIENT_SIZE, DRIVER_NOT_LOADED = 3, 6, 7, 9  # nvmlReturn_t
EXCLUSIVE_THREAD, PROHIBITED, EXCLUSIVE_PROCESS = 1, 2, 3  # nvmlComputeMode_t


class NvmlError(RuntimeError):
    """NVML refused a call."""

    def __init__(self, call: str, status: int) -> None:
        super().__init__(f"{call} failed with status {status}")
        self.status = status


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or an instance of one."""

    uuid: str  # "GPU-...", or "MIG-..." of an instance
    name: str
    capability: tuple[int, int]
    total_memory: int  # bytes
    free_memory: int
    mode: str = ""  # why no process can begin to compute here: "prohibited", or "taken" (one at a time, and one does)
    path: str = ""  # of an instance: its other name, "MIG-GPU-.../GPU instance/compute instance"
    instances: tuple[Gpu, ...] | None = None  # None: the GPU is not divided


@dataclass(frozen=True, slots=True)
class Report:
    """All that NVML was asked."""

    driver: str  # "580.65.06"
    cuda: tuple[int, int]  # the newest CUDA that the driver serves
    gpus: tuple[Gpu, ...]  # in the order of their places on the PCI bus


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def library() -> Any:
    """The library that comes with the driver, or None."""
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def report(nvml: Any) -> Report:
    """Raises NvmlError where a call is refused."""
    with _session(nvml):
        version = _integer(nvml, "nvmlSystemGetCudaDriverVersion_v2")
        handles = [_handle(nvml, i) for i in range(_integer(nvml, "nvmlDeviceGetCount_v2"))]
        return Report(
            driver=_text(nvml, "nvmlSystemGetDriverVersion"),
            cuda=(version // 1000, version % 1000 // 10),
            gpus=tuple(_gpu(nvml, handle) for handle in handles),
        )


@contextmanager
def _session(nvml: Any) -> Iterator[None]:
    _call(nvml, "nvmlInit_v2")
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any) -> Gpu:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call(nvml, "nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
    capability = (major.value, minor.value)
    uuid, name = _text(nvml, "nvmlDeviceGetUUID", handle), _text(nvml, "nvmlDeviceGetName", handle)
    instances = _instances(nvml, handle, uuid, capability)
    mode = "" if instances is not None else _mode(nvml, handle)
    return Gpu(uuid, name, capability, *_memory(nvml, handle), mode, instances=instances)


def _instances(nvml: Any, handle: Any, parent: str, capability: tuple[int, int]) -> tuple[Gpu, ...] | None:
    """Compute instances of a GPU that is divided (MIG); None where it is not, or cannot be."""
    current, pending = ctypes.c_uint(), ctypes.c_uint()
    if not _allowed(nvml, "nvmlDeviceGetMigMode", handle, ctypes.byref(current), ctypes.byref(pending)):
        return None
    if not current.value:
        return None
    found = []
    for index in range(_integer(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle)):
        mig = ctypes.c_void_p()
        call = "nvmlDeviceGetMigDeviceHandleByIndex"
        if not _allowed(nvml, call, handle, ctypes.c_uint(index), ctypes.byref(mig), but=NOT_FOUND):
            continue
        places = [_integer(nvml, f"nvmlDeviceGet{kind}InstanceId", mig) for kind in ("Gpu", "Compute")]
        path = f"MIG-{parent}/{places[0]}/{places[1]}"
        uuid, name = _text(nvml, "nvmlDeviceGetUUID", mig), _text(nvml, "nvmlDeviceGetName", mig)
        found.append(Gpu(uuid, name, capability, *_memory(nvml, mig), path=path))
    return tuple(found)


def _mode(nvml: Any, handle: Any) -> str:
    mode, processes = ctypes.c_int(), ctypes.c_uint()
    if not _allowed(nvml, "nvmlDeviceGetComputeMode", handle, ctypes.byref(mode)):
        return ""
    if mode.value == PROHIBITED:
        return "prohibited"
    if mode.value not in (EXCLUSIVE_THREAD, EXCLUSIVE_PROCESS):
        return ""
    call = "nvmlDeviceGetComputeRunningProcesses"  # room for none: it fails when there is one
    alone = _allowed(nvml, call, handle, ctypes.byref(processes), None, but=INSUFFICIENT_SIZE)
    return "" if alone else "taken"


def _memory(nvml: Any, handle: Any) -> tuple[int, int]:
    """Total and free bytes; none where the GPU has no memory of its own."""
    memory = _Memory()
    _allowed(nvml, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    return int(memory.total), int(memory.free)


def _handle(nvml: Any, index: int) -> Any:
    handle = ctypes.c_void_p()
    _call(nvml, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
    return handle


def _integer(nvml: Any, name: str, *arguments: Any) -> int:
    value = ctypes.c_uint()
    _call(nvml, name, *arguments, ctypes.byref(value))
    return int(value.value)


def _text(nvml: Any, name: str, *arguments: Any) -> str:
    text = ctypes.create_string_buffer(96)
    _call(nvml, name, *arguments, text, ctypes.c_uint(len(text)))
    return text.value.decode()


def _allowed(nvml: Any, name: str, *arguments: Any, but: int = NOT_SUPPORTED) -> bool:
    """Make a call; False when the answer is `but`, or when the library is older than the call."""
    if not hasattr(nvml, name):
        return False
    try:
        _call(nvml, name, *arguments)
    except NvmlError as e:
        if e.status != but:
            raise
        return False
    return True


def _call(nvml: Any, name: str, *arguments: Any) -> None:
    if status := getattr(nvml, name)(*arguments):
        raise NvmlError(name, status)
