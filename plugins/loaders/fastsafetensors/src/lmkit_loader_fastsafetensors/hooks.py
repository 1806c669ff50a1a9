"""Registration. Light: the library is imported when the loader has been chosen."""

from __future__ import annotations

from collections.abc import Iterable

from lmkit.api import LoaderSpec, Tier, hookimpl


@hookimpl
def lmkit_loaders() -> Iterable[LoaderSpec]:
    yield LoaderSpec(
        name="fastsafetensors",
        summary="Safetensors files, each read whole and in parallel",
        target="lmkit_loader_fastsafetensors.loader:FastSafetensorsLoader",
        requires=("fastsafetensors>=0.5",),
        tier=Tier.REFERENCE,
        stability="experimental",  # named, never chosen: the default needs less memory
        formats=("safetensors",),
    )
