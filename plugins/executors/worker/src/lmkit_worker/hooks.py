"""Registers the executor `uniproc` and the loaders `safetensors` and `dummy`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from lmkit.api import Checkpoint, CheckpointOptions, ExecutorSpec, LoaderSpec, Tier, hookimpl

DUMMY = "dummy"


@dataclass(frozen=True)
class Options:
    """Options of the loader `dummy`."""

    seed: int = 0


@hookimpl
def lmkit_resolve_checkpoint(ref: str, options: CheckpointOptions) -> Checkpoint | None:
    """A directory or a hub's repository with all but weights, where the user names the loader that needs none."""
    if options.loader != DUMMY:
        return None
    files, path = import_module("lmkit.checkpoint"), Path(ref).expanduser()
    if not path.is_dir():
        if not files.HUB_ID.match(ref):
            return None
        path = files.download(ref, options, [name for name in files.PATTERNS if "safetensors" not in name])
        if folders := files.module_paths(path):
            files.download(ref, options, [f"{folder}/*.json" for folder in folders], ignore=())
    if not (path / "config.json").is_file():
        return None
    found: Checkpoint = files.read_directory(ref, path, options.revision, files=[])
    return found


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
    yield LoaderSpec(
        name=DUMMY,
        summary="Random weights of the right shapes, for benchmarks; reads no file",
        target="lmkit_worker.loading.dummy:DummyLoader",
        options="lmkit_worker.hooks:Options",
        tier=Tier.REFERENCE,
        stability="experimental",
        formats=("safetensors",),
    )
