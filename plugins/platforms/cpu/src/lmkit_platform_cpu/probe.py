"""What this host offers, read from /proc, /sys and cgroups. No torch."""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from lmkit.api import DeviceInfo, Unavailable

from lmkit_platform_cpu.native import own_processor_flags

BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # any of them multiplies bfloat16 in hardware
FLAGS = (
    "sse4_2", "avx", "avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16", "neon", "asimd", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip
GIB = 1 << 30
PROCESS = 155 << 20  # anonymous memory of an engine's process without a model: Python 3.11, torch 2.13, x86-64 Linux


def probe(root: Path = Path("/")) -> list[DeviceInfo] | Unavailable:
    """The host as one device. `root` stands for the file system in tests."""
    flags, name = cpu_flags(root)
    total, free = memory(root)
    fast = bool(BFLOAT16_FLAGS & set(flags))
    native = own_processor_flags() if root == Path("/") else ()
    if native:  # the last is what `auto` takes
        name = f"{name}, native kernels up to {native[-1].removeprefix('native_')}"
    return [
        DeviceInfo(
            platform="cpu",
            device_type="cpu",
            name=name,
            total_memory=total,
            free_memory=max(0, free - reserve(total)),
            process_bytes=PROCESS,
            num_cores=physical_cores(root),
            dtypes=("bfloat16", "float32", "float16") if fast else ("float32", "bfloat16", "float16"),
            flags=(*flags, *native),
        )
    ]


def reserve(total: int) -> int:
    """Bytes left to the rest of the host: a quarter, at most 4 GiB."""
    return min(total // 4, 4 * GIB)


def cpu_flags(root: Path = Path("/")) -> tuple[tuple[str, ...], str]:
    """(known ISA flags present, model name) of the first processor."""
    flags: set[str] = set()
    name = ""
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if not key.strip():
            break
        if key.strip() in ("flags", "Features"):
            flags = set(value.split())
        elif key.strip() == "model name":
            name = value.strip()
    return tuple(flag for flag in FLAGS if flag in flags), name or platform.processor() or platform.machine()


def physical_cores(root: Path = Path("/")) -> int:
    """Physical cores this process may use: affinity, hyper-threads counted once, CPU quota of the cgroup."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = set()
    for cpu in allowed:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        core = _read(topology / "core_id").strip()
        cores.add((_read(topology / "physical_package_id").strip(), core) if core else cpu)
    count = len(cores) or 1
    quota = cpu_quota(root)
    return max(1, min(count, math.ceil(quota))) if quota else count


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time the cgroup grants, or None without a limit."""
    quotas = []
    for group in _cgroups(root, "cpu"):
        parts = _read(group / "cpu.max").split()
        if len(parts) != 2:
            parts = [_read(group / "cpu.cfs_quota_us").strip(), _read(group / "cpu.cfs_period_us").strip()]
        if all(part.isdigit() and int(part) > 0 for part in parts):
            quotas.append(int(parts[0]) / int(parts[1]))
    return min(quotas, default=None)


def memory(root: Path = Path("/")) -> tuple[int, int]:
    """(total, free) bytes: the host's, or less where a cgroup says so. Page cache counts as free."""
    info = {}
    for line in _read(root / "proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        info[key] = int(value.split()[0]) * 1024
    total = info.get("MemTotal") or _sysconf_memory()
    free = info.get("MemAvailable", total)
    for group in _cgroups(root, "memory"):
        for limit_file, used_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _read(group / limit_file).strip(), _read(group / used_file).strip()
            if limit.isdigit() and int(limit) < total:
                cached = _stat(group / "memory.stat", ("inactive_file", "total_inactive_file"))
                total = int(limit)
                free = min(free, total - int(used or 0) + cached)
    return total, max(0, min(free, total))


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Directories of this process's cgroup and its parents, version 2 and version 1."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = base / path.strip("/")
        yield group
        for parent in group.parents:
            if not parent.is_relative_to(base):
                break
            yield parent


def _stat(path: Path, names: tuple[str, ...]) -> int:
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key in names and value.isdigit():
            return int(value)
    return 0


def _sysconf_memory() -> int:
    if sys.platform == "win32":
        return 8 * GIB
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read(path: Path) -> str:
    """The text of a file, or "" where there is none: not every kernel has every file."""
    try:
        return path.read_text()
    except OSError:
        return ""
