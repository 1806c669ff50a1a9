"""Registers the executor `uniproc` and the loaders `safetensors` and `dummy`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from lmkit.api import (
    Checkpoint,
    CheckpointOptions,
    ConfigProposal,
    EngineConfig,
    ExecutorSpec,
    LoaderRequest,
    LoaderSpec,
    Refusal,
    ResolvedPlan,
    Tier,
    hookimpl,
)

DUMMY = "dummy"
CONVERT = "write it as safetensors: pip install lmkit-convert; lmkit convert DIRECTORY -o NEW"
# Loaders of other servers that are refused: name -> summary, what is needed, what is offered, what to do
REFUSED = {
    "sharded_state": (
        "Refused: files of single ranks; ordinary ones serve any number of ranks",
        "the parameters of an engine with the same plugins, sizes and ranks",
        "files as published, of which a rank keeps its part only",
        "leave it out; --packed-cache FOLDER keeps weights as they are after loading",
    ),
    "tensorizer": (
        "Refused: its types can be objects of Python; lmkit convert writes safetensors of it",
        "a reader that takes no objects of Python from a file",
        "*.tensors",
        CONVERT,
    ),
}


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


def sharded_state(request: LoaderRequest) -> Iterable[Refusal]:
    yield Refusal("refused", *REFUSED["sharded_state"][1:])


def tensorizer(request: LoaderRequest) -> Iterable[Refusal]:
    yield Refusal("refused", *REFUSED["tensorizer"][1:])


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
def lmkit_configure(config: EngineConfig, plan: ResolvedPlan) -> Iterable[ConfigProposal]:
    """Guesses follow the tokens of a row, which are not known while its last step is in flight."""
    if plan.choice("proposer") is not None and config.parallel.pp == 1:
        yield ConfigProposal("parallel.depth", 1, "draft tokens need one step in flight", strength="require")


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
    for name, (summary, *_) in REFUSED.items():
        yield LoaderSpec(
            name=name,
            summary=summary,
            target="lmkit_worker.loading.safetensors:SafetensorsLoader",
            check=f"lmkit_worker.hooks:{name}",
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
