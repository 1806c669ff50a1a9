"""The CPU platform: conformance, probing of described hosts, the linear kernel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from lmkit.api import DeviceInfo, LinearSpec, OpRequest
from lmkit.config import EngineConfig, ParallelConfig
from lmkit_layers.linear import PLAIN
from lmkit_platform_cpu import check, platform, probe
from lmkit_platform_cpu.linear import MAX_PACKED, OneDnnLinear
from lmkit_testing import PlatformConformance, PluginConformance

GIB = 1 << 30


class TestCpuPlatform(PlatformConformance):
    plugin = "platform:cpu"


class TestLinear(PluginConformance):
    plugin = "op:linear_onednn"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 12582912 kB\n"


def test_memory_of_a_host(tmp_path: Path) -> None:
    assert probe.memory(write(tmp_path, {"proc/meminfo": MEMINFO})) == (16 * GIB, 12 * GIB)


@pytest.mark.parametrize("version", [1, 2])
def test_memory_of_a_container(tmp_path: Path, version: int) -> None:
    """The limit of a parent group counts too; page cache that can be dropped is free."""
    if version == 2:
        files = {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/memory.max": str(4 * GIB),
            "sys/fs/cgroup/a/memory.current": str(3 * GIB),
            "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
        }
    else:
        files = {
            "proc/self/cgroup": "5:cpu,cpuacct:/a\n3:memory:/a\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(4 * GIB),
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": str(3 * GIB),
            "sys/fs/cgroup/memory/a/memory.stat": f"total_inactive_file {GIB}\n",
        }
    assert probe.memory(write(tmp_path, {"proc/meminfo": MEMINFO, **files})) == (4 * GIB, 2 * GIB)


def test_cores_are_counted_once_and_bounded_by_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    topology = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/{name}": value
        for cpu in range(8)
        for name, value in (("core_id", str(cpu % 4)), ("physical_package_id", "0"))
    }
    root = write(tmp_path, topology)
    assert probe.physical_cores(root) == 4
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"})
    assert probe.physical_cores(root) == 3
    write(tmp_path, {"sys/fs/cgroup/cpu.max": "max 100000\n"})
    assert probe.physical_cores(root) == 4


@pytest.mark.parametrize(
    ("cpuinfo", "first"),
    [
        ("processor: 0\nmodel name : Fast\nflags : fpu avx2 avx512_bf16\n\nflags: none\n", "bfloat16"),
        ("processor: 0\nmodel name : Old\nflags : fpu avx2\n\n", "float32"),
        ("processor: 0\nFeatures : fp asimd bf16\n\n", "bfloat16"),
        ("", "float32"),
    ],
)
def test_preferred_dtype_follows_the_instruction_set(tmp_path: Path, cpuinfo: str, first: str) -> None:
    root = write(tmp_path, {"proc/cpuinfo": cpuinfo, "proc/meminfo": MEMINFO})
    (device,) = probe.probe(root)
    assert device.dtypes[0] == first
    assert device.free_memory == 8 * GIB, "a quarter, at most 4 GiB, is left to the host"
    assert set(device.flags) <= set(probe.FLAGS)


def test_ranks_on_other_hosts_take_nothing_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkit_platform_cpu.platform.memory", lambda: (16 * GIB, 12 * GIB))
    monkeypatch.setattr("lmkit_platform_cpu.platform.reserve", lambda _: 4 * GIB)
    monkeypatch.setattr("lmkit_platform_cpu.ranks.open_collectives", lambda *_: None)
    cpu = platform.CpuPlatform()
    cpu.collectives(0, 4, "tcp://10.0.0.1:1")
    assert cpu.free_memory() == 2 * GIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cpu.free_memory() == 4 * GIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert cpu.free_memory() == 2 * GIB, "there are not so many"


def test_bare_system_still_answers(tmp_path: Path) -> None:
    (device,) = probe.probe(tmp_path)
    assert device.total_memory > 0
    assert device.num_cores >= 1


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "physical_cores", lambda: 6)
    made = platform.CpuPlatform()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert made.worker_env(EngineConfig(), 0)["OMP_NUM_THREADS"] == "6"
    assert made.worker_env(EngineConfig(), 0)["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert made.worker_env(EngineConfig(), 0)["OMP_NUM_THREADS"] == "4"
    assert made.worker_env(EngineConfig(), 0)["OMP_WAIT_POLICY"] == "active"
    assert made.worker_env(EngineConfig(parallel=ParallelConfig(threads=3)), 0)["OMP_NUM_THREADS"] == "3"
    before = torch.get_num_threads()
    for text, expected in [("2", 2), ("2,1", 2), ("", 6), ("zero", 6)]:
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        made.bind(0)
        assert torch.get_num_threads() == expected
    torch.set_num_threads(before)


def test_denormals_are_flushed_in_an_own_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = torch.full((1,), 1e-39)
    made = platform.CpuPlatform()
    made.bind(0)
    assert float(tiny * 1) > 0
    monkeypatch.setenv(platform.OWN_PROCESS, made.worker_env(EngineConfig(), 0)[platform.OWN_PROCESS])
    try:
        made.bind(0)
        assert float(tiny * 1) == 0
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(48, 32), (1, 8), (MAX_PACKED + 8, 16)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_equals_the_reference(dtype: torch.dtype, shape: tuple[int, int], bias: bool) -> None:
    if dtype == torch.bfloat16 and not probe.BFLOAT16_FLAGS & set(probe.cpu_flags()[0]):
        pytest.skip("the kernel refuses bfloat16 on this processor, and oneDNN cannot pack it")
    torch.manual_seed(0)
    weight, kernel = torch.randn(shape).to(dtype), OneDnnLinear()
    spec = LinearSpec("layer", shape[1], (shape[0],), bias=bias)
    packed = kernel.pack(PLAIN, {"weight": weight.clone()}, spec, dtype)
    assert packed.nbytes == weight.nbytes
    added = torch.randn(shape[0]).to(dtype) if bias else None
    for rows in (1, 2, 17, 40):
        x = torch.randn(rows, shape[1]).to(dtype)
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if added is None else added.double())
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(kernel.apply(x, packed, added).double(), expected, rtol=tolerance, atol=tolerance)


def test_linear_is_refused_without_the_instructions() -> None:
    old = DeviceInfo("cpu", "cpu", flags=("avx2",))
    (refusal,) = check.bfloat16(OpRequest(op="linear", device=old))
    assert refusal.code == "isa"
    assert not list(check.bfloat16(OpRequest(op="linear", device=DeviceInfo("cpu", "cpu", flags=("amx_bf16",)))))
