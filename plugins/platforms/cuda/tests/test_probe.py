"""The probe with a stand-in for NVML: what a process would see, in its numbers."""

# ruff: noqa: N802  (the names are those of NVML)
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lmkit.api import ConfigError, DeviceInfo, Unavailable
from lmkit.plugins.host import PluginHost
from lmkit.plugins.platforms import choose_platform
from lmkit.plugins.switches import Switches
from lmkit_platform_cuda import nvml as module
from lmkit_platform_cuda.nvml import NvmlError
from lmkit_platform_cuda.probe import describe, probe

GIB = 1 << 30
NOT_SUPPORTED, NOT_FOUND, INSUFFICIENT_SIZE = 3, 6, 7


@dataclass(frozen=True)
class Fake:
    """A GPU as NVML tells of it; `mig`: its instances, or None where an index is empty."""

    name: str
    uuid: str
    capability: tuple[int, int]
    memory: int
    mode: int = 0
    processes: int = 0
    mig: tuple[Fake | None, ...] | None = None
    place: tuple[int, int] = (0, 0)  # of an instance


T4 = Fake("Tesla T4", "GPU-aaaa", (7, 5), 15 * GIB)
H200 = Fake("NVIDIA H200", "GPU-bbbb", (9, 0), 141 * GIB)
PARTS = (
    Fake("NVIDIA A100 MIG 3g.20gb", "MIG-1111", (8, 0), 20 * GIB, place=(1, 0)),
    None,
    Fake("NVIDIA A100 MIG 2g.10gb", "MIG-2222", (8, 0), 10 * GIB, place=(5, 0)),
)
A100 = Fake("NVIDIA A100", "GPU-cccc", (8, 0), 40 * GIB, mig=PARTS)
EMPTY = Fake("NVIDIA A100", "GPU-dddd", (8, 0), 40 * GIB, mig=())


class Nvml:
    """NVML as the probe calls it; `status` is what nvmlInit_v2 returns. A handle is a number of `units`."""

    def __init__(self, gpus: list[Fake], status: int = 0) -> None:
        self.gpus, self.status, self.open = gpus, status, 0
        self.units: list[Fake] = [*gpus, *(part for gpu in gpus for part in gpu.mig or () if part)]

    def unit(self, handle: Any) -> Fake:
        return self.units[handle.value - 1]

    def nvmlInit_v2(self) -> int:
        self.open += not self.status
        return self.status

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, size: Any) -> int:
        text.value = b"580.65.06"
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, value: Any) -> int:
        value._obj.value = 13010
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetName(self, handle: Any, name: Any, size: Any) -> int:
        name.value = self.unit(handle).name.encode()
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, uuid: Any, size: Any) -> int:
        uuid.value = self.unit(handle).uuid.encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.free = self.unit(handle).memory, self.unit(handle).memory // 2
        return 0 if self.unit(handle).memory else NOT_SUPPORTED

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self.unit(handle).capability
        return 0

    def nvmlDeviceGetComputeMode(self, handle: Any, mode: Any) -> int:
        mode._obj.value = self.unit(handle).mode
        return 0

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any, count: Any, infos: None) -> int:
        return INSUFFICIENT_SIZE if self.unit(handle).processes else 0

    def nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> int:
        current._obj.value = self.unit(handle).mig is not None
        return NOT_SUPPORTED if self.unit(handle).capability < (8, 0) else 0

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, count: Any) -> int:
        count._obj.value = len(self.unit(handle).mig or ())
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: Any, mig: Any) -> int:
        part = (self.unit(handle).mig or ())[index.value]
        if part is None:
            return NOT_FOUND
        mig._obj.value = self.units.index(part) + 1
        return 0

    def nvmlDeviceGetGpuInstanceId(self, mig: Any, value: Any) -> int:
        value._obj.value = self.unit(mig).place[0]
        return 0

    def nvmlDeviceGetComputeInstanceId(self, mig: Any, value: Any) -> int:
        value._obj.value = self.unit(mig).place[1]
        return 0


Install = Callable[..., Nvml]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Install:
    def install(gpus: list[Fake] | None, status: int = 0, kind: type[Nvml] = Nvml) -> Nvml | None:
        library = None if gpus is None else kind(gpus, status)
        monkeypatch.setattr(module, "library", lambda: library)
        return library

    return install  # type: ignore[return-value]


def names(found: list[DeviceInfo] | Unavailable) -> list[str]:
    """UUIDs of the devices, whose indices count from 0."""
    assert isinstance(found, list), found
    assert [device.index for device in found] == list(range(len(found)))
    return [device.flags[0] for device in found]


def refusal(found: list[DeviceInfo] | Unavailable) -> str:
    assert isinstance(found, Unavailable)
    return f"{found.reason} -> {found.fix}"


def test_devices(nvml: Install, tmp_path: Path) -> None:
    library = nvml([T4, H200])
    devices = probe(tmp_path, {})
    assert names(devices) == ["GPU-aaaa", "GPU-bbbb"]
    assert [(d.name, d.capability, d.total_memory, d.free_memory) for d in devices] == [  # type: ignore[union-attr]
        ("Tesla T4", (7, 5), 15 * GIB, 15 * GIB // 2),
        ("NVIDIA H200", (9, 0), 141 * GIB, 141 * GIB // 2),
    ]
    assert [d.dtypes for d in devices] == [("float16", "float32"), ("bfloat16", "float16", "float32")]  # type: ignore[union-attr]
    assert devices[1].flags == ("GPU-bbbb", "driver=580.65.06", "cuda=13.1")  # type: ignore[index]
    assert library.open == 0


@pytest.mark.parametrize(
    ("gpus", "setting", "expected"),
    [
        ([T4, H200], "1", ["GPU-bbbb"]),
        ([T4, H200], "1,0", ["GPU-bbbb", "GPU-aaaa"]),
        ([T4, H200], "GPU-bb", ["GPU-bbbb"]),
        ([T4, H200], "0,7,1", ["GPU-aaaa"]),  # as the driver: what follows an invalid number is hidden
        ([T4, H200], "", []),
        ([T4, H200], "-1", []),
        ([T4, H200], "GPU-", []),  # which of them?
        ([T4, H200], "MIG-1111", []),
        ([A100], None, ["MIG-1111"]),  # a process has one instance
        ([T4, A100], None, ["MIG-1111"]),  # or whole GPUs
        ([T4, A100], "0", ["GPU-aaaa"]),
        ([T4, A100], "1", ["MIG-1111"]),
        ([T4, A100], "GPU-cc", ["MIG-1111"]),
        ([T4, A100], "MIG-2222", ["MIG-2222"]),
        ([T4, A100], "MIG-2222,MIG-1111", ["MIG-2222"]),
        ([T4, A100], "MIG-GPU-cccc/5/0", ["MIG-2222"]),
        ([T4, A100], "MIG-22", []),  # instances are named in full
        ([EMPTY, T4], None, ["GPU-aaaa"]),
        ([EMPTY, T4], "0", []),
        ([EMPTY, T4], "1", ["GPU-aaaa"]),  # a divided GPU without instances keeps its number
    ],
)
def test_visible_devices(
    nvml: Install, tmp_path: Path, gpus: list[Fake], setting: str | None, expected: list[str]
) -> None:
    nvml(gpus)
    found = probe(tmp_path, {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting})
    if expected:
        assert names(found) == expected
    else:
        assert f"CUDA_VISIBLE_DEVICES={setting} hides every GPU" in refusal(found)


def test_an_instance_has_its_own_memory(nvml: Install, tmp_path: Path) -> None:
    nvml([A100])
    (device,) = probe(tmp_path, {"CUDA_VISIBLE_DEVICES": "MIG-2222"})  # type: ignore[misc]
    assert (device.name, device.capability, device.total_memory) == ("NVIDIA A100 MIG 2g.10gb", (8, 0), 10 * GIB)


def test_divided_and_without_instances(nvml: Install, tmp_path: Path) -> None:
    nvml([EMPTY])
    assert "divided (MIG) and has no instance -> nvidia-smi mig" in refusal(probe(tmp_path, {}))


def test_a_library_older_than_mig(nvml: Install, tmp_path: Path) -> None:
    class Old(Nvml):
        def __getattribute__(self, name: str) -> Any:
            if name == "nvmlDeviceGetMigMode":
                raise AttributeError(name)
            return super().__getattribute__(name)

    nvml([H200], kind=Old)
    assert names(probe(tmp_path, {})) == ["GPU-bbbb"]


@pytest.mark.parametrize(
    ("mode", "processes", "flag"),
    [(0, 5, ""), (2, 0, "mode=prohibited"), (3, 0, ""), (3, 1, "mode=taken"), (1, 1, "mode=taken")],
)
def test_compute_modes(nvml: Install, tmp_path: Path, mode: int, processes: int, flag: str) -> None:
    nvml([Fake("NVIDIA H200", "GPU-bbbb", (9, 0), 141 * GIB, mode, processes)])
    (device,) = probe(tmp_path, {})  # type: ignore[misc]
    assert [f for f in device.flags if f.startswith("mode")] == ([flag] if flag else [])


def test_a_gpu_without_memory_of_its_own(nvml: Install, tmp_path: Path) -> None:
    nvml([Fake("NVIDIA GB10", "GPU-eeee", (12, 1), 0)])
    (device,) = probe(tmp_path, {})  # type: ignore[misc]
    assert (device.total_memory, device.free_memory) == (0, 0)


def test_no_driver_is_unavailable(nvml: Install, tmp_path: Path) -> None:
    nvml(None)
    assert "no NVIDIA driver" in refusal(probe(tmp_path, {}))
    nvml([], status=9)
    assert "not loaded" in refusal(probe(tmp_path, {}))
    nvml([])
    assert "reports no GPU" in refusal(probe(tmp_path, {}))


def test_a_driver_that_does_not_answer_raises(nvml: Install, tmp_path: Path) -> None:
    """Which stops automatic choice of the platform, instead of running on the CPU."""
    nvml([], status=18)  # library and driver of different versions
    with pytest.raises(NvmlError, match="nvmlInit_v2 failed with status 18"):
        probe(tmp_path, {})
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").touch()
    nvml([], status=9)
    with pytest.raises(NvmlError):
        probe(tmp_path, {})


def test_names_from_proc_without_nvml(nvml: Install, tmp_path: Path) -> None:
    nvml(None)
    for place, name, uuid in (("01", "Tesla T4", "GPU-aaaa"), ("02", "NVIDIA H200", "GPU-bbbb")):
        folder = tmp_path / f"proc/driver/nvidia/gpus/0000:{place}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {name}\nIRQ:  50\nGPU UUID: \t {uuid}\n")
    devices = probe(tmp_path, {"CUDA_VISIBLE_DEVICES": "1"})
    assert names(devices) == ["GPU-bbbb"]
    assert (devices[0].name, devices[0].capability) == ("NVIDIA H200", None)  # type: ignore[index]


def test_described() -> None:
    assert describe("7.5", 16 * GIB).dtypes == ("float16", "float32")
    assert describe("", 0).capability == (8, 0)
    with pytest.raises(ConfigError, match="'hopper' is no compute capability"):
        describe("hopper", 0)
    host = PluginHost(switches=Switches())
    _, device = choose_platform(host, "auto", "cuda:9.0:80GB")
    assert (device.capability, device.total_memory, device.described) == ((9, 0), 80_000_000_000, True)
