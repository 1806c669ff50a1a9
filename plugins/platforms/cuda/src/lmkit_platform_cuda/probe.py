"""Which NVIDIA GPUs a process would see, without torch and without a device context.

NVML says it, or else what the driver shows in /proc.

No driver means Unavailable. A driver that is there and does not answer is an error, never "no GPU".
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from lmkit.api import ConfigError, DeviceInfo, Unavailable
from lmkit_gpu.budget import process_bytes

from lmkit_platform_cuda import nvml

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Part:
    """What a process can have: a whole GPU, or one instance of a divided one."""

    gpu: int  # number of the GPU
    names: tuple[str, ...]  # UUIDs and the like, of the GPU and of the instance
    device: DeviceInfo
    instance: bool = False


def probe(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> list[DeviceInfo] | Unavailable:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible, numbered as the process will see them.

    Numbers in that variable count the GPUs by their places on the PCI bus, which workers are told to do, too. `root`
    stands for the file system in tests.
    """
    library = nvml.library()
    if library is None:
        parts = _from_proc(root)
        if not parts:
            reason = "no NVIDIA driver (no NVML library, nothing in /proc/driver/nvidia)"
            return Unavailable(reason, "install the driver: nvidia-smi then lists the GPUs")
    else:
        try:
            report = nvml.report(library)
        except nvml.NvmlError as e:
            if e.status == nvml.DRIVER_NOT_LOADED and not _driver_present(root):
                return Unavailable("the NVIDIA driver is not loaded")
            raise
        if not report.gpus:
            return Unavailable("the NVIDIA driver reports no GPU")
        parts = [part for number, gpu in enumerate(report.gpus) for part in _parts(number, gpu, report)]
        if not parts:
            return Unavailable(
                "every GPU is divided (MIG) and has no instance",
                "nvidia-smi mig -cgi PROFILE -C makes one, nvidia-smi -mig 0 ends the division",
            )
    setting = (os.environ if environ is None else environ).get(VISIBLE)
    chosen = _visible(parts, setting)
    if not chosen:
        names = ", ".join(part.names[-1] for part in parts)
        return Unavailable(f"{VISIBLE}={setting} hides every GPU", f"unset {VISIBLE}, or name some of: {names}")
    return [msgspec.structs.replace(part.device, index=index) for index, part in enumerate(chosen)]


def describe(model: str, total_memory: int) -> DeviceInfo:
    """The device a user describes by its compute capability, "9.0"; 8.0 when none is given. Raises ConfigError."""
    match = re.fullmatch(r"(\d+)\.(\d+)", model or "8.0")
    if match is None:
        raise ConfigError(f"{model!r} is no compute capability", fix="for example cuda:9.0:80GB")
    capability = (int(match[1]), int(match[2]))
    return DeviceInfo(
        platform="cuda",
        device_type="cuda",
        capability=capability,
        total_memory=total_memory,
        free_memory=total_memory,
        process_bytes=process_bytes(total_memory),
        dtypes=dtypes(capability),
        described=True,
    )


def dtypes(capability: tuple[int, int] | None) -> tuple[str, ...]:
    """bfloat16 arithmetic begins with capability 8.0."""
    bfloat16 = ("bfloat16",) if capability is not None and capability >= (8, 0) else ()
    return (*bfloat16, "float16", "float32")


def _parts(number: int, gpu: nvml.Gpu, report: nvml.Report) -> list[Part]:
    """The GPU as one part, or its instances. What `check` reads later is said in flags: NAME=VALUE."""
    driver = (f"driver={report.driver}", "cuda={}.{}".format(*report.cuda))
    parts = []
    for unit in (gpu,) if gpu.instances is None else gpu.instances:
        device = DeviceInfo(
            platform="cuda",
            device_type="cuda",
            name=unit.name,
            capability=unit.capability,
            total_memory=unit.total_memory,
            free_memory=unit.free_memory,
            process_bytes=process_bytes(unit.total_memory),
            dtypes=dtypes(unit.capability),
            flags=(unit.uuid, *driver, *([f"mode={unit.mode}"] if unit.mode else [])),
        )
        names = (gpu.uuid,) if unit is gpu else (gpu.uuid, unit.path, unit.uuid)
        parts.append(Part(number, names, device, unit is not gpu))
    return parts


def _driver_present(root: Path) -> bool:
    return (root / "proc/driver/nvidia/version").exists() or (root / "dev/nvidia0").exists()


def _from_proc(root: Path) -> list[Part]:
    """Names only: without NVML the capability is unknown, so what needs one is refused with that reason."""
    parts = []
    for number, path in enumerate(sorted(root.glob("proc/driver/nvidia/gpus/*/information"))):
        fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        name, uuid = (fields.get(key, "").strip() for key in ("Model", "GPU UUID"))
        device = DeviceInfo(platform="cuda", device_type="cuda", name=name, dtypes=dtypes(None), flags=(uuid,))
        parts.append(Part(number, (uuid,), device))
    return parts


def _visible(parts: Sequence[Part], setting: str | None) -> list[Part]:
    """As CUDA applies CUDA_VISIBLE_DEVICES: numbers, UUIDs or their beginnings, up to the first that names no GPU.

    Of a divided GPU the first instance is taken. A process has one instance, or whole GPUs.
    """
    chosen: list[Part] = []
    if setting is None:
        chosen = [part for i, part in enumerate(parts) if part.gpu not in {p.gpu for p in parts[:i]}]
    else:
        for item in filter(None, (part.strip() for part in setting.split(","))):
            found = [part for part in parts if _names(item, part)]
            if len({part.gpu for part in found}) != 1:
                break
            chosen.append(found[0])
    return [part for part in chosen if part.instance][:1] or chosen


def _names(item: str, part: Part) -> bool:
    if item.startswith("MIG-"):
        return item in part.names
    return item == str(part.gpu) or (item.startswith("GPU-") and part.names[0].startswith(item))
