"""Which NVIDIA GPUs are here, without torch and without a device context: NVML, else what the driver shows in /proc.

No driver means Unavailable. A driver that is there and does not answer is an error, never "no GPU".
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from lmkit.api import DeviceInfo, Refusal, SelectRequest, Unavailable

LIBRARIES = ("libnvidia-ml.so.1", "nvml.dll")
DRIVER_NOT_LOADED = 9  # NVML_ERROR_DRIVER_NOT_LOADED


class NvmlError(RuntimeError):
    """NVML refused a call."""

    def __init__(self, call: str, status: int) -> None:
        super().__init__(f"{call} failed with status {status}")
        self.status = status


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def probe(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> list[DeviceInfo] | Unavailable:
    """All GPUs that CUDA_VISIBLE_DEVICES leaves visible. `root` stands for the file system in tests."""
    library = _library()
    if library is None:
        devices = list(_from_proc(root))
        if not devices:
            return Unavailable("no NVIDIA driver (no NVML library, nothing in /proc/driver/nvidia)")
    else:
        try:
            devices = _from_nvml(library)
        except NvmlError as e:
            if e.status == DRIVER_NOT_LOADED and not _driver_present(root):
                return Unavailable("the NVIDIA driver is not loaded")
            raise
        if not devices:
            return Unavailable("the NVIDIA driver reports no GPU")
    visible = _visible(devices, (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES"))
    return visible or Unavailable("CUDA_VISIBLE_DEVICES hides every GPU", "unset CUDA_VISIBLE_DEVICES")


def describe(capability: tuple[int, int] | None, total_memory: int) -> DeviceInfo:
    """The device a user describes, "cuda:9.0:80GB"; capability 8.0 when none is given."""
    capability = capability or (8, 0)
    return DeviceInfo(
        platform="cuda",
        device_type="cuda",
        capability=capability,
        total_memory=total_memory,
        free_memory=total_memory,
        dtypes=dtypes(capability),
        described=True,
    )


def check(request: SelectRequest) -> Iterable[Refusal]:
    """A GPU is of no use to a torch that was built without CUDA. Described devices are not run, so they pass."""
    if request.device is None or request.device.described:
        return
    version = metadata.version("torch")
    if version.endswith("+cpu"):
        yield Refusal("torch-build", "torch built for CUDA", version, "pip install --force-reinstall torch")


def dtypes(capability: tuple[int, int] | None) -> tuple[str, ...]:
    """bfloat16 arithmetic begins with capability 8.0."""
    bfloat16 = ("bfloat16",) if capability is not None and capability >= (8, 0) else ()
    return (*bfloat16, "float16", "float32")


def _library() -> Any:
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@contextmanager
def _session(nvml: Any) -> Iterator[None]:
    _call(nvml, "nvmlInit_v2")
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _call(nvml: Any, name: str, *arguments: Any) -> None:
    if status := getattr(nvml, name)(*arguments):
        raise NvmlError(name, status)


def _from_nvml(nvml: Any) -> list[DeviceInfo]:
    devices = []
    with _session(nvml):
        count = ctypes.c_uint()
        _call(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
        for index in range(count.value):
            handle, name, memory = ctypes.c_void_p(), ctypes.create_string_buffer(96), _Memory()
            major, minor = ctypes.c_int(), ctypes.c_int()
            uuid = ctypes.create_string_buffer(96)
            _call(nvml, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            _call(nvml, "nvmlDeviceGetName", handle, name, ctypes.c_uint(len(name)))
            _call(nvml, "nvmlDeviceGetUUID", handle, uuid, ctypes.c_uint(len(uuid)))
            _call(nvml, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
            _call(nvml, "nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
            capability = (major.value, minor.value)
            devices.append(
                DeviceInfo(
                    platform="cuda",
                    device_type="cuda",
                    name=name.value.decode(),
                    capability=capability,
                    total_memory=memory.total,
                    free_memory=memory.free,
                    dtypes=dtypes(capability),
                    flags=(uuid.value.decode(),),
                    index=index,
                )
            )
    return devices


def _driver_present(root: Path) -> bool:
    return (root / "proc/driver/nvidia/version").exists() or (root / "dev/nvidia0").exists()


def _from_proc(root: Path) -> Iterator[DeviceInfo]:
    """Names only: without NVML the capability is unknown, so what needs one is refused with that reason."""
    for index, path in enumerate(sorted(root.glob("proc/driver/nvidia/gpus/*/information"))):
        fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        name, uuid = (fields.get(key, "").strip() for key in ("Model", "GPU UUID"))
        yield DeviceInfo(
            platform="cuda", device_type="cuda", name=name, dtypes=dtypes(None), flags=(uuid,), index=index
        )


def _visible(devices: list[DeviceInfo], setting: str | None) -> list[DeviceInfo]:
    """Apply CUDA_VISIBLE_DEVICES: numbers or UUID prefixes, in its order, up to the first that names no device."""
    if setting is None:
        return devices
    visible = []
    for item in filter(None, (part.strip() for part in setting.split(","))):
        found = [
            d for d in devices if str(d.index) == item or (item.startswith("GPU-") and d.flags[0].startswith(item))
        ]
        if len(found) != 1:
            break
        visible.append(found[0])
    return visible
