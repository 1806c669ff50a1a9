"""Registers the executor `uniproc` and the loader `safetensors`."""

from __future__ import annotations

from collections.abc import Iterable

from lmkit.api import ExecutorSpec, LoaderSpec, Tier, hookimpl


@hookimpl
def lmkit_executors() -> Iterable[ExecutorSpec]:
    yield ExecutorSpec(
        name="uniproc",
        summary="One worker in the engine process",
        target="lmkit_worker.uniproc:UniprocExecutor",
        tier=Tier.PORTABLE,
        stability="stable",
        max_ranks=1,
    )


@hookimpl
def lmkit_loaders() -> Iterable[LoaderSpec]:
    yield LoaderSpec(
        name="safetensors",
        summary="Memory-mapped safetensors files, single or sharded",
        target="lmkit_worker.loading.safetensors:SafetensorsLoader",
        tier=Tier.PORTABLE,
        stability="stable",
        formats=("safetensors",),
    )
