"""Registers the executor `multiproc`."""

from __future__ import annotations

from collections.abc import Iterable

from lmkit.api import ConfigProposal, ExecutorSpec, ResolvedPlan, Tier, hookimpl


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


@hookimpl
def lmkit_configure(plan: ResolvedPlan) -> Iterable[ConfigProposal]:
    executor = plan.choice("executor")
    if executor is not None and executor.name == "multiproc":
        yield ConfigProposal("parallel.depth", 1, "ranks have one step in flight", strength="require")
