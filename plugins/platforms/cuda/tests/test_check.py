"""What is refused before anything is loaded: torch builds, drivers, GPUs on which no process may compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lmkit.api import DeviceInfo, Refusal, SelectRequest
from lmkit_gpu.build import TorchBuild, torch_build
from lmkit_platform_cuda import check as module
from lmkit_platform_cuda.check import check, runs
from lmkit_platform_cuda.probe import describe

VERSION = """from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'rocm', 'xpu']
__version__ = '{version}'
debug = False
cuda: Optional[str] = {cuda!r}
git_version = 'cf30153c4c131c8164ee7798e5022d810682e2cb'
hip: Optional[str] = {hip!r}
xpu: Optional[str] = None
"""


def gpu(capability: tuple[int, int] | None = (9, 0), *, cuda: str = "13.1", mode: str = "") -> DeviceInfo:
    flags = ("GPU-aaaa", "driver=550.54.14", f"cuda={cuda}", *([f"mode={mode}"] if mode else []))
    return DeviceInfo("cuda", "cuda", capability=capability, flags=flags)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def ask(version: str, cuda: str | None, device: DeviceInfo, hip: str | None = None) -> dict[str, Refusal]:
        (tmp_path / "version.py").write_text(VERSION.format(version=version, cuda=cuda, hip=hip))
        monkeypatch.setattr(module, "torch_build", lambda: torch_build(tmp_path))
        return {r.code: r for r in check(SelectRequest(kind="platform", device=device))}

    return ask


def test_the_installed_build_is_read_as_text() -> None:
    import torch
    from torch import version

    build = torch_build()
    assert build is not None
    assert (build.version, build.cuda, build.hip) == (torch.__version__, version.cuda, version.hip)


def test_a_build_that_fits(refused: Any) -> None:
    assert refused("2.13.0+cu130", "13.0", gpu()) == {}
    assert refused("2.13.0+cpu", None, describe("9.0", 0)) == {}  # a described device is not run


@pytest.mark.parametrize(
    ("version", "hip", "offered"),
    [
        ("2.13.0+cpu", None, "torch 2.13.0+cpu, built for the processor alone"),
        ("2.13.0", None, "torch 2.13.0, built for the processor alone"),
        ("2.9.0+rocm6.4", "6.4.43482", "torch 2.9.0+rocm6.4, built for hip 6.4.43482"),
    ],
)
def test_builds_for_something_else(refused: Any, version: str, hip: str | None, offered: str) -> None:
    found = refused(version, None, gpu(), hip)
    assert {code: r.offered for code, r in found.items()} == {"torch-build": offered}
    assert found["torch-build"].fix


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "torch_build", lambda: None)
    (found,) = check(SelectRequest(kind="platform", device=gpu()))
    assert (found.offered, found.fix) == ("torch is not installed", "pip install torch")


@pytest.mark.parametrize(
    ("version", "cuda", "capability", "fix"),
    [
        ("2.13.0+cu130", "13.0", (7, 0), "CUDA 12.6"),
        ("2.13.0+cu130", "13.0", (6, 1), "CUDA 12.6"),
        ("2.11.0+cu128", "12.8", (7, 0), "CUDA 12.6"),
        ("2.10.0+cu128", "12.8", (7, 0), ""),
        ("2.9.0+cu126", "12.6", (10, 0), "CUDA 13.0"),
        ("2.9.0+cu126", "12.6", (8, 9), ""),  # runs what was made for 8.6
        ("2.9.0+cu128", "12.8", (12, 1), ""),
        ("2.9.0+cu130", "13.0", (14, 0), ""),  # compiled by the driver
        ("2.9.0+cu130", "13.0", (3, 5), "build torch for this GPU"),
        ("2.9.0+cu130", "13.0", None, ""),  # known from /proc alone
        ("2.9.0a0+git1234", "13.0", (3, 5), ""),  # who builds torch knows for what
    ],
)
def test_machine_code(refused: Any, version: str, cuda: str, capability: tuple[int, int] | None, fix: str) -> None:
    found = refused(version, cuda, gpu(capability))
    assert set(found) == ({"torch-arch"} if fix else set())
    if fix:
        assert fix in found["torch-arch"].fix


def test_generations() -> None:
    assert runs("7.5 8.6", (8, 9))
    assert not runs("7.5 8.6", (8, 0))
    assert not runs("7.5 8.6", (9, 0))
    assert runs("7.5 8.6+PTX", (9, 0))


def test_a_driver_too_old(refused: Any) -> None:
    found = refused("2.13.0+cu130", "13.0", gpu(cuda="12.4"))
    assert set(found) == {"driver"}
    assert "580.65 or later" in found["driver"].needed
    assert found["driver"].offered == "driver 550.54.14, for CUDA up to 12.4"
    assert "CUDA 12" in found["driver"].fix
    assert refused("2.13.0+cu128", "12.8", gpu(cuda="12.4")) == {}  # of the same major version


@pytest.mark.parametrize("mode", ["prohibited", "taken"])
def test_gpus_on_which_no_process_may_compute(refused: Any, mode: str) -> None:
    found = refused("2.13.0+cu130", "13.0", gpu(mode=mode))
    assert set(found) == {"compute-mode"}
    assert "nvidia-smi -i GPU-aaaa -c DEFAULT" in found["compute-mode"].fix


def test_how_builds_are_called() -> None:
    assert str(TorchBuild("2.9.0+xpu", xpu="20250301")) == "torch 2.9.0+xpu, built for xpu 20250301"
