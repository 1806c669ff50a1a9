"""The platform object, conformance, and torch builds that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lmkit.api import DeviceInfo, Refusal, SelectRequest
from lmkit_gpu.build import TorchBuild
from lmkit_platform_rocm import check as module
from lmkit_platform_rocm.check import archs, check
from lmkit_platform_rocm.platform import RocmPlatform
from lmkit_platform_rocm.probe import describe
from lmkit_testing import PlatformConformance

GIB = 1 << 30
MI300X = DeviceInfo("rocm", "cuda", capability=(9, 4), flags=("gfx942",))


class TestRocm(PlatformConformance):
    plugin = "platform:rocm"


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Any:
    def ask(build: TorchBuild | None, device: DeviceInfo = MI300X) -> list[Refusal]:
        monkeypatch.setattr(module, "torch_build", lambda: build)
        return list(check(SelectRequest(kind="platform", device=device)))

    return ask


def wheel(folder: Path, *models: str) -> TorchBuild:
    """A torch for ROCm that has kernels for these."""
    library = folder / "lib/rocblas/library"
    library.mkdir(parents=True)
    for model in models:
        (library / f"TensileLibrary_lazy_{model}.dat").touch()
        (library / f"Kernels.so-000-{model}-xnack-.hsaco").touch()
    (library / "TensileManifest.txt").touch()
    return TorchBuild("2.9.0+rocm6.4", hip="6.4.43482", folder=folder)


def test_builds_for_something_else(refused: Any) -> None:
    for build, offered in [
        (TorchBuild("2.13.0+cu130", cuda="13.0"), "torch 2.13.0+cu130, built for cuda 13.0"),
        (TorchBuild("2.13.0+cpu"), "torch 2.13.0+cpu, built for the processor alone"),
        (None, "torch is not installed"),
    ]:
        (found,) = refused(build)
        assert (found.code, found.offered) == ("torch-build", offered)
        assert "ROCm" in found.fix
        assert refused(build, describe("gfx942", 0)) == []  # a described device is not run


def test_builds_without_the_instruction_set(refused: Any, tmp_path: Path) -> None:
    build = wheel(tmp_path, "gfx906", "gfx90a", "gfx1100")
    assert archs(tmp_path) == {"gfx906", "gfx90a", "gfx1100"}
    (found,) = refused(build)
    assert (found.code, found.offered) == ("torch-arch", "torch 2.9.0+rocm6.4 has gfx1100, gfx906, gfx90a")
    assert "gfx942" in found.needed


def test_builds_that_fit(refused: Any, tmp_path: Path) -> None:
    assert refused(wheel(tmp_path, "gfx90a", "gfx942")) == []
    assert refused(TorchBuild("2.9.0", hip="6.4", folder=tmp_path / "system")) == []  # libraries of the system


def test_defaults_and_ranks() -> None:
    platform = RocmPlatform()
    assert platform.defaults(None, describe("gfx942", 192 * GIB))["sched.max_rows"] == 256  # type: ignore[arg-type]
    assert platform.collectives(0, 1).size == 1
    assert platform.runtime.collectives == "nccl"
    with pytest.raises(ValueError, match="to find each other"):
        platform.collectives(0, 2)
