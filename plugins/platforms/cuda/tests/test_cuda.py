"""The probe with a stand-in for NVML, described devices, and refusal of a torch without CUDA."""

# ruff: noqa: N802  (the names are those of NVML)
from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from lmkit.api import ConfigError, DeviceInfo, SelectRequest, Unavailable
from lmkit.plugins.host import PluginHost
from lmkit.plugins.platforms import choose_platform
from lmkit.plugins.switches import Switches
from lmkit_platform_cuda import probe as module
from lmkit_platform_cuda.platform import CudaPlatform
from lmkit_platform_cuda.probe import NvmlError, check, describe, probe
from lmkit_testing import PluginConformance

GIB = 1 << 30
GPUS = [("Tesla T4", "GPU-aaaa", (7, 5), 15 * GIB), ("NVIDIA H200", "GPU-bbbb", (9, 0), 141 * GIB)]


class Nvml:
    """NVML as the probe calls it; `status` is what nvmlInit_v2 returns."""

    def __init__(self, gpus: list[Any], status: int = 0) -> None:
        self.gpus, self.status, self.open = gpus, status, 0

    def nvmlInit_v2(self) -> int:
        self.open += not self.status
        return self.status

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetName(self, handle: Any, name: Any, size: Any) -> int:
        name.value = self.gpus[handle.value - 1][0].encode()
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, uuid: Any, size: Any) -> int:
        uuid.value = self.gpus[handle.value - 1][1].encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total = self.gpus[handle.value - 1][3]
        memory._obj.free = self.gpus[handle.value - 1][3] // 2
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self.gpus[handle.value - 1][2]
        return 0


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(gpus: list[Any] | None, status: int = 0) -> Nvml | None:
        library = None if gpus is None else Nvml(gpus, status)
        monkeypatch.setattr(module, "_library", lambda: library)
        return library

    return install


class TestCuda(PluginConformance):
    plugin = "platform:cuda"
    torch_free_target = True


def test_devices(nvml: Any, tmp_path: Path) -> None:
    library = nvml(GPUS)
    devices = probe(tmp_path, {})
    assert isinstance(devices, list)
    assert [(d.name, d.capability, d.total_memory, d.free_memory, d.index) for d in devices] == [
        ("Tesla T4", (7, 5), 15 * GIB, 15 * GIB // 2, 0),
        ("NVIDIA H200", (9, 0), 141 * GIB, 141 * GIB // 2, 1),
    ]
    assert [d.dtypes for d in devices] == [("float16", "float32"), ("bfloat16", "float16", "float32")]
    assert library.open == 0


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("1", ["NVIDIA H200"]),
        ("1,0", ["NVIDIA H200", "Tesla T4"]),
        ("GPU-bb", ["NVIDIA H200"]),
        ("0,7,1", ["Tesla T4"]),  # as the driver: what follows an invalid number is hidden
        ("", []),
        ("-1", []),
    ],
)
def test_visible_devices(nvml: Any, tmp_path: Path, setting: str, names: list[str]) -> None:
    nvml(GPUS)
    found = probe(tmp_path, {"CUDA_VISIBLE_DEVICES": setting})
    if names:
        assert isinstance(found, list)
        assert [d.name for d in found] == names
    else:
        assert isinstance(found, Unavailable)
        assert "CUDA_VISIBLE_DEVICES" in found.reason


def test_no_driver_is_unavailable(nvml: Any, tmp_path: Path) -> None:
    nvml(None)
    assert "no NVIDIA driver" in probe(tmp_path, {}).reason  # type: ignore[union-attr]
    nvml([], status=9)
    assert "not loaded" in probe(tmp_path, {}).reason  # type: ignore[union-attr]
    nvml([])
    assert "reports no GPU" in probe(tmp_path, {}).reason  # type: ignore[union-attr]


def test_a_driver_that_does_not_answer_raises(nvml: Any, tmp_path: Path) -> None:
    """Which stops automatic choice of the platform, instead of running on the CPU."""
    nvml([], status=18)  # library and driver of different versions
    with pytest.raises(NvmlError, match="nvmlInit_v2 failed with status 18"):
        probe(tmp_path, {})
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").touch()
    nvml([], status=9)
    with pytest.raises(NvmlError):
        probe(tmp_path, {})


def test_names_from_proc_without_nvml(nvml: Any, tmp_path: Path) -> None:
    nvml(None)
    folder = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t\t Tesla T4\nIRQ:  50\nGPU UUID: \t GPU-aaaa\n")
    devices = probe(tmp_path, {})
    assert isinstance(devices, list)
    assert (devices[0].name, devices[0].capability, devices[0].flags) == ("Tesla T4", None, ("GPU-aaaa",))


def test_described() -> None:
    assert describe((7, 5), 16 * GIB).dtypes == ("float16", "float32")
    assert describe(None, 0).capability == (8, 0)
    host = PluginHost(switches=Switches())
    _, device = choose_platform(host, "auto", "cuda:9.0:80GB")
    assert (device.capability, device.total_memory, device.described) == ((9, 0), 80_000_000_000, True)


def test_torch_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = DeviceInfo(platform="cuda", device_type="cuda", capability=(9, 0))
    request = SelectRequest(kind="platform", device=device)
    monkeypatch.setattr(module.metadata, "version", lambda name: "2.9.0+cpu")
    assert [r.code for r in check(request)] == ["torch-build"]
    monkeypatch.setattr(module.metadata, "version", lambda name: "2.9.0")
    assert list(check(request)) == []
    assert list(check(SelectRequest(kind="platform", device=describe((9, 0), 0)))) == []


def test_probe_is_quick() -> None:
    start = time.perf_counter()
    probe()
    assert time.perf_counter() - start < 0.2


def test_defaults_and_ranks() -> None:
    platform = CudaPlatform()
    large, small = (platform.defaults(None, describe(*of)) for of in (((9, 0), 80 * GIB), ((7, 5), 16 * GIB)))  # type: ignore[arg-type]
    assert large == {"sched.max_tokens": 8192, "sched.max_rows": 256, "parallel.depth": 2}
    assert small == {"sched.max_tokens": 2048, "sched.max_rows": 64, "parallel.depth": 2}
    assert platform.collectives(0, 1).size == 1
    with pytest.raises(ConfigError, match="one rank"):
        platform.collectives(0, 2)
