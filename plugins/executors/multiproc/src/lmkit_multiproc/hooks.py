"""Registers the executor `multiproc`."""

from __future__ import annotations

from collections.abc import Iterable

from lmkit.api import ExecutorSpec, Tier, hookimpl


@hookimpl
def lmkit_executors() -> Iterable[ExecutorSpec]:
    yield ExecutorSpec(
        name="multiproc",
        summary="One process per rank, on one host",
        target="lmkit_multiproc.executor:MultiprocExecutor",
        tier=Tier.REFERENCE,
        stability="beta",
        max_ranks=64,
    )
