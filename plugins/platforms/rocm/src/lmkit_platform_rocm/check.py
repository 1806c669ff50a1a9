"""What an AMD GPU asks of the installed torch, before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from lmkit.api import Refusal, SelectRequest
from lmkit_gpu.build import torch_build

INSTALL = "install a torch built for ROCm (its version ends in +rocm...)"
KERNELS = "lib/rocblas/library"  # beside torch: matrix products, files by instruction set


def check(request: SelectRequest) -> Iterable[Refusal]:
    """Described devices are not run, so they pass."""
    device = request.device
    if device is None or device.described:
        return
    build = torch_build()
    if build is None or build.hip is None:
        yield Refusal("torch-build", "torch built for ROCm", str(build or "torch is not installed"), INSTALL)
        return
    model, have = device.flags[0], archs(build.folder)
    if have and model not in have:
        offered = f"torch {build.version} has {', '.join(sorted(have))}"
        yield Refusal("torch-arch", f"a torch with kernels for {model}", offered, f"install a torch that has {model}")


def archs(folder: Path) -> set[str]:
    """Instruction sets for which the libraries that came with torch have kernels; none where the system's are used."""
    library = folder / KERNELS
    names = [path.name for path in library.iterdir()] if library.is_dir() else []
    return {match[0] for name in names if (match := re.search(r"gfx[0-9a-f]+", name))}
