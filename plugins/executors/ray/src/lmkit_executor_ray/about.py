"""What ranks must have in common: the versions of what they run, and the checkpoint. Asked before weights are read."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import msgspec
from lmkit.api import CheckpointError, ConfigError

if TYPE_CHECKING:
    from lmkit.api import Checkpoint, ResolvedPlan

DISTS = ("lmkit-core", "lmkit-worker", "lmkit-executor-multiproc", "lmkit-executor-ray", "ray", "torch")
PLACES = 16  # of each file that are looked at
LOOK = 1 << 16  # bytes of each


class About(msgspec.Struct):
    """One process of the engine. `node`: Ray's name of where it is; `weights`: a digest, or why there is none."""

    pid: int
    node: str
    address: str
    versions: dict[str, str]
    weights: str
    readable: bool = True


def about(node: str, address: str, resolved: ResolvedPlan, checkpoint: Checkpoint) -> About:
    """This process."""
    dists = (*DISTS, *(choice.dist for choice in resolved.choices if choice.dist))
    found = {name: _version(name) for name in dict.fromkeys(dists)}
    versions = {"Python": platform.python_version(), **found}
    try:
        return About(os.getpid(), node, address, versions, digest(checkpoint))
    except OSError as e:
        return About(os.getpid(), node, address, versions, f"{e.filename}: {e.strerror}", readable=False)


def compare(here: About, ranks: Iterable[About]) -> None:
    """Raises ConfigError or CheckpointError for the first rank that would not do what this process means."""
    for rank, other in enumerate(ranks):
        where = f"rank {rank}, on {other.address}"
        for name, wanted in here.versions.items():
            if (found := other.versions.get(name, "")) != wanted:
                raise ConfigError(
                    f"{where}, has {name} {found or 'not at all'}; here it is {wanted or 'not there'}",
                    fix=f"install {name} {wanted} on each node"
                    if wanted
                    else f"remove {name} there, or install it here",
                )
        if not other.readable:
            raise CheckpointError(f"{where}, cannot read {other.weights}", fix="the same path on each node")
        if other.weights != here.weights:
            raise CheckpointError(
                f"{where}, has another checkpoint at that path: digest {other.weights}, here {here.weights}",
                fix="copy the checkpoint to each node, or put it into a folder that all of them see",
            )


def digest(checkpoint: Checkpoint) -> str:
    """Over the configuration, and for each file its name, length and 16 pieces of its content. Raises OSError."""
    h = blake2b(digest_size=8)
    h.update(msgspec.json.encode(checkpoint.config, order="sorted", enc_hook=str))
    for path in checkpoint.files:
        size = path.stat().st_size
        h.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            for i in range(PLACES):
                file.seek(max(0, size - LOOK) * i // (PLACES - 1))
                h.update(file.read(LOOK))
    return h.hexdigest()


def _version(dist: str) -> str:
    try:
        return version(dist)
    except PackageNotFoundError:
        return ""
