"""Registers the executor `multiproc`."""

from __future__ import annotations

from collections.abc import Iterable

from lmkit.api import ConfigProposal, EngineConfig, ExecutorSpec, ResolvedPlan, Tier, hookimpl

IN_FLIGHT = "ranks have at most one step more in flight than there are stages (--pp)"


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
def lmkit_configure(config: EngineConfig, plan: ResolvedPlan) -> Iterable[ConfigProposal]:
    executor = plan.choice("executor")
    if executor is not None and executor.name == "multiproc":
        yield from steps_in_flight(config)


def steps_in_flight(config: EngineConfig) -> Iterable[ConfigProposal]:
    """One for each stage, which works on rows of its own meanwhile. Without stages it is for the platform to say."""
    most, key = most_in_flight(config), "parallel.depth"
    if config.parallel.in_flight > most:
        yield ConfigProposal(key, most, IN_FLIGHT, strength="require")
    elif config.parallel.pp > 1:
        yield ConfigProposal(key, config.parallel.pp, "each stage works on a step of its own")


def most_in_flight(config: EngineConfig) -> int:
    """One more than there are stages: it is on its way while all of them work."""
    return config.parallel.pp + 1
