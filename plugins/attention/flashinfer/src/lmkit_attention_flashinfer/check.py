"""Whether this machine can compile flashinfer's kernels, which it does when they are first used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from lmkit.api import Refusal, SelectRequest

COMPILED = "flashinfer-jit-cache"  # a dist of compiled kernels


def compilers(request: SelectRequest) -> Iterable[Refusal]:
    """Described devices are not run, so they pass."""
    if request.device is None or request.device.described or _installed(COMPILED):
        return
    missing = [name for name, path in (("nvcc", _nvcc(os.environ)), ("ninja", shutil.which("ninja"))) if not path]
    if missing:
        fix = {"nvcc": "install the CUDA toolkit and set CUDA_HOME", "ninja": "pip install ninja"}
        yield Refusal(
            "compilers",
            "nvcc and ninja, which compile its kernels",
            f"no {' and no '.join(missing)}",
            "; ".join(fix[name] for name in missing) + f"; or install {COMPILED}",
        )


def _nvcc(environ: Mapping[str, str]) -> str | None:
    """Where flashinfer looks for it."""
    if named := environ.get("FLASHINFER_NVCC"):
        return named
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    found = shutil.which("nvcc") if home is None else None
    path = Path(home or "/usr/local/cuda") / "bin/nvcc"
    return found or (str(path) if path.exists() else None)


def _installed(dist: str) -> bool:
    try:
        metadata.version(dist)
    except metadata.PackageNotFoundError:
        return False
    return True
