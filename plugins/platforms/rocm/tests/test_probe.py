"""The probe on trees of files as the amdgpu driver shows them: what a process would see, in its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from lmkit.api import ConfigError, DeviceInfo, Unavailable
from lmkit.plugins.host import PluginHost
from lmkit.plugins.platforms import choose_platform
from lmkit.plugins.switches import Switches
from lmkit_platform_rocm.probe import describe, dtypes, probe

GIB = 1 << 30
PROCESSOR = "cpu_cores_count 96\nsimd_count 0\ngfx_target_version 0\ndrm_render_minor 0\n"


@dataclass(frozen=True)
class Fake:
    """A GPU as the driver tells of it."""

    version: int  # gfx_target_version
    memory: int
    unique: int = 0
    product: str = ""


MI300X = Fake(90402, 192 * GIB, 0x1BD2A4C8E5A4C9F7, "AMD Instinct MI300X")
MI210 = Fake(90010, 64 * GIB, 0xAB)
W7900 = Fake(110000, 48 * GIB)
INTEGRATED = Fake(110003, 512 << 20)


def machine(root: Path, gpus: Sequence[Fake], hidden: Sequence[int] = ()) -> Path:
    """Writes what the driver of a machine with these GPUs shows; render nodes of `hidden` ones are not there."""
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    (nodes / "0").mkdir(parents=True)
    (nodes / "0/properties").write_text(PROCESSOR)
    (root / "dev/dri").mkdir(parents=True)
    (root / "dev/kfd").touch()
    for i, gpu in enumerate(gpus):
        node, minor = nodes / str(i + 1), 128 + 8 * i
        node.mkdir()
        lines = {"simd_count": 1216, "gfx_target_version": gpu.version, "drm_render_minor": minor}
        fields = {**lines, "unique_id": gpu.unique}
        (node / "properties").write_text("".join(f"{key} {value}\n" for key, value in fields.items()))
        card = root / f"sys/class/drm/renderD{minor}/device"
        card.mkdir(parents=True)
        (card / "mem_info_vram_total").write_text(f"{gpu.memory}\n")
        (card / "mem_info_vram_used").write_text(f"{gpu.memory // 4}\n")
        if gpu.product:
            (card / "product_name").write_text(f"{gpu.product}\n")
        if i not in hidden:
            (root / f"dev/dri/renderD{minor}").touch()
    return root


def models(found: list[DeviceInfo] | Unavailable) -> list[str]:
    """Instruction sets of the devices, whose indices count from 0."""
    assert isinstance(found, list), found
    assert [device.index for device in found] == list(range(len(found)))
    return [device.flags[0] for device in found]


def reason(found: list[DeviceInfo] | Unavailable) -> str:
    assert isinstance(found, Unavailable)
    return found.reason


def test_devices(tmp_path: Path) -> None:
    first, second = probe(machine(tmp_path, [MI300X, W7900]), {})  # type: ignore[misc]
    assert (first.platform, first.device_type) == ("rocm", "cuda")
    assert (first.name, first.capability, first.flags) == (
        "AMD Instinct MI300X", (9, 4), ("gfx942", "GPU-1bd2a4c8e5a4c9f7"),
    )  # fmt: skip
    assert (first.total_memory, first.free_memory) == (192 * GIB, 144 * GIB)
    assert (second.name, second.capability, second.flags, second.index) == ("gfx1100", (11, 0), ("gfx1100",), 1)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HIP_VISIBLE_DEVICES": "1"}, ["gfx90a"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["gfx90a"]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, ["gfx942"]),
        ({"ROCR_VISIBLE_DEVICES": "2,0"}, ["gfx1100", "gfx942"]),
        ({"ROCR_VISIBLE_DEVICES": "2,1", "HIP_VISIBLE_DEVICES": "1"}, ["gfx90a"]),  # counts what the first leaves
        ({"ROCR_VISIBLE_DEVICES": "GPU-00000000000000ab"}, ["gfx90a"]),
        ({"HIP_VISIBLE_DEVICES": "2,9,0"}, ["gfx1100"]),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, []),
    ],
)
def test_visible_devices(tmp_path: Path, environ: dict[str, str], expected: list[str]) -> None:
    found = probe(machine(tmp_path, [MI300X, MI210, W7900]), environ)
    if expected:
        assert models(found) == expected
    else:
        assert "VISIBLE_DEVICES" in reason(found)
        assert "hides every GPU" in reason(found)


def test_no_driver(tmp_path: Path) -> None:
    assert "no AMD GPU driver" in reason(probe(tmp_path, {}))


def test_a_container_without_gpus(tmp_path: Path) -> None:
    """/sys shows those of the machine all the same."""
    root = machine(tmp_path, [MI300X])
    (root / "dev/dri/renderD128").unlink()
    assert "no GPU that this process may open" in reason(probe(root, {}))
    (root / "dev/kfd").unlink()
    assert "/dev/kfd" in reason(probe(root, {}))


def test_a_container_with_one_of_two_gpus(tmp_path: Path) -> None:
    assert models(probe(machine(tmp_path, [MI300X, MI210], hidden=[0]), {})) == ["gfx90a"]


def test_only_processors(tmp_path: Path) -> None:
    assert "no GPU" in reason(probe(machine(tmp_path, []), {}))


def test_another_instruction_set_by_the_user(tmp_path: Path) -> None:
    root = machine(tmp_path, [INTEGRATED])
    assert models(probe(root, {})) == ["gfx1103"]
    assert models(probe(root, {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"})) == ["gfx1100"]


def test_dtypes() -> None:
    half = ("float16", "float32")
    assert {model for model in ("gfx906", "gfx1030") if dtypes(model) == half} == {"gfx906", "gfx1030"}
    for model in ("gfx908", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"):
        assert dtypes(model) == ("bfloat16", *half)


def test_described() -> None:
    assert describe("", 0).flags == ("gfx942",)
    with pytest.raises(ConfigError, match=r"'9\.4' is no name of an instruction set"):
        describe("9.4", 0)
    _, device = choose_platform(PluginHost(switches=Switches()), "auto", "rocm:gfx90a:64GB")
    assert (device.name, device.capability, device.total_memory) == ("gfx90a", (9, 0), 64_000_000_000)
    assert device.described
