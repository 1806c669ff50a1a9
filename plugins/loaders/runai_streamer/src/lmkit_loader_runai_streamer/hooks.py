"""Registration. Light: the library is imported when the loader has been chosen."""

from __future__ import annotations

from collections.abc import Iterable

from lmkit.api import LoaderSpec, Tier, hookimpl


@hookimpl
def lmkit_loaders() -> Iterable[LoaderSpec]:
    yield LoaderSpec(
        name="runai_streamer",
        summary="Safetensors files, streamed by many threads",
        target="lmkit_loader_runai_streamer.loader:StreamedLoader",
        requires=("runai-model-streamer>=0.17",),
        tier=Tier.REFERENCE,
        stability="experimental",  # named, never chosen: the default needs less memory
        formats=("safetensors",),
    )
