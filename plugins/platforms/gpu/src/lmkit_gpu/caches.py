"""Where compiled kernels are kept: one folder for all that compile some, to be mounted or carried as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUTE_DSL_CACHE_DIR": "cute_dsl",
    "CUDA_CACHE_PATH": "driver",
}


def kernel_caches(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that name the folders, but those that `environ` has already: of `lmkit/kernels` in XDG_CACHE_HOME, or
    in ~/.cache (XDG Base Directory Specification; a path there that is not absolute counts as none)."""
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    base = base if base.is_absolute() else Path.home() / ".cache"
    return {name: str(base / "lmkit" / "kernels" / part) for name, part in CACHES.items() if name not in environ}
