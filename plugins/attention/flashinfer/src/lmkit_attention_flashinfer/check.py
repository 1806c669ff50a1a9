"""What flashinfer does not run of all that is declared: shapes, and machines that cannot compile its kernels, which it
does when they are first used. Light: the resolver asks, and the backend when it is loaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from lmkit.api import AttentionRequest, AttnNeed, Refusal, SelectRequest

COMPILED = "flashinfer-jit-cache"  # a dist of compiled kernels
LATENT = (576, 512)  # entries of a latent with its rotary part, and of those that are values
TILE = 64  # queries times heads that a program of latent attention takes, or two such programs together


def check(request: AttentionRequest) -> Iterable[Refusal]:
    if reason := shapes(request.need):
        yield Refusal("shape", "heads, latents and caches that its kernels read", reason)
    yield from compilers(request)


def shapes(need: AttnNeed) -> str | None:
    """A reason against the need, whatever the device, or None."""
    if need.mla:
        return _no_latents(need)
    if need.v_head_dim not in (None, need.head_dim):
        return f"v_head_dim {need.v_head_dim} differs from head_dim {need.head_dim}"
    if need.head_dim == LATENT[0]:
        return f"heads of {need.head_dim} are supported as latents (mla) alone"
    return None


def _no_latents(need: AttnNeed) -> str | None:
    """A reason against latent attention, or None."""
    sizes = (need.head_dim, need.v_head_dim)
    if sizes != LATENT:
        return f"latents of {sizes[0]} entries with {sizes[1]} values: {LATENT[0]} with {LATENT[1]} are supported"
    if need.num_kv_heads != 1 or need.window is not None or need.softcap is not None or not need.causal:
        return "latents are supported for one KV head and causal attention, without window or softcap"
    if (2 * TILE) % need.num_q_heads:  # its kernels leave a key out where a tile ends within the heads of a query
        return f"{need.num_q_heads} query heads of latents: a divisor of {2 * TILE} is supported"
    if need.kv_dtype not in ("auto", need.dtype):
        return f"latents are kept in {need.dtype}, not in {need.kv_dtype}"
    return None


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
