"""What a GPU asks of the installation before anything is loaded: of torch, of the driver, and of who else computes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from lmkit.api import DeviceInfo, Refusal, SelectRequest
from lmkit_gpu.build import TorchBuild, torch_build
from packaging.version import Version

# Capabilities that PyTorch's own builds have machine code for: since which CUDA, since which torch, capabilities. The
# last row that fits holds. Code runs on later GPUs of the same generation (8.6 on 8.9); "+PTX": on all later ones.
# Source: RELEASE.md of pytorch and its build scripts.
ARCHS = (
    ("11.8", "2.0", "5.0 6.0 7.0 7.5 8.0 8.6 9.0"),
    ("12.6", "2.6", "5.0 6.0 7.0 7.5 8.0 8.6 9.0"),
    ("12.8", "2.7", "7.0 7.5 8.0 8.6 9.0 10.0 12.0"),
    ("12.8", "2.11", "7.5 8.0 8.6 9.0 10.0 12.0"),
    ("13.0", "2.9", "7.5 8.0 8.6 9.0 10.0 11.0 12.0+PTX"),
)
DRIVERS = {11: "450.80", 12: "525.60", 13: "580.65"}  # the first driver that serves a CUDA: all of its minor versions


def check(request: SelectRequest) -> Iterable[Refusal]:
    """Described devices are not run, so they pass."""
    device = request.device
    if device is None or device.described:
        return
    build = torch_build()
    if build is None:
        yield Refusal("torch-build", "torch built for CUDA", "torch is not installed", "pip install torch")
    elif build.cuda is None:
        yield Refusal("torch-build", "torch built for CUDA", str(build), "pip install --force-reinstall torch")
    else:
        yield from _driver(build.cuda, device)
        yield from _arch(build, device)
    mode = _flag(device, "mode")
    if mode == "prohibited":
        fix = f"nvidia-smi -i {device.flags[0]} -c DEFAULT"
        yield Refusal("compute-mode", "a GPU that computes", "compute mode PROHIBITED", fix)
    elif mode == "taken":
        offered, fix = "compute mode EXCLUSIVE, and a process has it", f"nvidia-smi -i {device.flags[0]} -c DEFAULT"
        yield Refusal("compute-mode", "a GPU that is free", offered, f"end that process, or {fix}")


def _driver(cuda: str, device: DeviceInfo) -> Iterator[Refusal]:
    """A driver serves every CUDA of its own major version, and older ones."""
    major, served = int(cuda.split(".")[0]), _flag(device, "cuda")
    if served and int(served.split(".")[0]) < major:
        yield Refusal(
            "driver",
            f"a driver for CUDA {major} ({DRIVERS.get(major, 'a newer one')} or later), as torch is built for {cuda}",
            f"driver {_flag(device, 'driver')}, for CUDA up to {served}",
            f"update the driver, or install a torch built for CUDA {served.split('.')[0]}",
        )


def _arch(build: TorchBuild, device: DeviceInfo) -> Iterator[Refusal]:
    """Builds that PyTorch publishes ("+cu128") are known; what others have built is for them to know."""
    match = re.fullmatch(r"[\d.]+\+cu\d+", build.version)
    if match is None or build.cuda is None or device.capability is None:
        return
    made_for, torch = Version(build.cuda), Version(build.version.split("+")[0])
    rows = [row for row in ARCHS if Version(row[0]) <= made_for and Version(row[1]) <= torch]
    if not rows or runs(rows[-1][2], device.capability):
        return
    newest = {cuda: archs for cuda, _, archs in ARCHS}
    others = [cuda for cuda, archs in newest.items() if runs(archs, device.capability)]
    yield Refusal(
        "torch-arch",
        "a torch with machine code for capability {}.{}".format(*device.capability),
        f"torch {build.version} has {rows[-1][2].replace(' ', ', ')}",
        f"install a torch built for CUDA {others[-1]}" if others else "build torch for this GPU",
    )


def runs(archs: str, capability: tuple[int, int]) -> bool:
    """Whether a GPU of this capability runs machine code for `archs`, "7.5 8.0 9.0+PTX"."""
    own = [tuple(map(int, arch.removesuffix("+PTX").split("."))) for arch in archs.split()]
    return any(a[0] == capability[0] and a[1] <= capability[1] for a in own) or (
        archs.endswith("+PTX") and capability > own[-1]
    )


def _flag(device: DeviceInfo, name: str) -> str:
    """The value of NAME=VALUE among the flags of a device, or nothing."""
    return next((flag.partition("=")[2] for flag in device.flags if flag.startswith(f"{name}=")), "")
