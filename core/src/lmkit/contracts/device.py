"""What a platform knows about a device, as data. Described devices ("cuda:9.0:80GB") have the same type."""

from __future__ import annotations

import msgspec


class DeviceInfo(msgspec.Struct, frozen=True):
    """One device. Set by a platform's probe; read by the resolver, `explain` and planners."""

    platform: str  # name of the platform plugin
    device_type: str  # torch device type
    name: str = ""  # "Tesla T4", "Intel Xeon ..."
    capability: tuple[int, int] | None = None  # compute capability where the platform has one
    total_memory: int = 0  # bytes
    free_memory: int = 0  # bytes at probe time
    process_bytes: int = 0  # of this memory, what an engine's process takes before it holds anything of a model
    num_cores: int = 0
    dtypes: tuple[str, ...] = ("float32",)  # dtypes with native or acceptable speed, preferred first
    flags: tuple[str, ...] = ()  # ISA flags and the like
    index: int = 0
    described: bool = False  # True: written by the user, not probed


class Unavailable(msgspec.Struct, frozen=True):
    """A probe's answer when there is no such device here. A probe that *raises* is a broken plugin instead."""

    reason: str
    fix: str = ""
