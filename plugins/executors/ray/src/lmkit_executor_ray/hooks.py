"""Registers the executor `ray`. Ray itself is imported when it runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lmkit.api import ConfigProposal, EngineConfig, ExecutorSpec, ResolvedPlan, Tier, hookimpl
from lmkit_multiproc.hooks import steps_in_flight

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of executor.ray."""

    address: str = "local"  # "local": a cluster of this host alone; "auto": the one it is in; or host:port of the head
    strategy: str = "PACK"  # how ranks are placed: as Ray's placement groups say
    seconds: int = 60  # that the cluster may take to find room, and to start the ranks

    def __post_init__(self) -> None:
        if self.address.startswith("ray://"):
            raise ValueError("address is of a Ray client, and ranks need a driver: run lmkit on a node, with auto")
        if self.strategy not in STRATEGIES or self.seconds < 1:
            raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, and seconds positive")


@hookimpl
def lmkit_executors() -> Iterable[ExecutorSpec]:
    yield ExecutorSpec(
        name="ray",
        summary="Ranks as actors of a Ray cluster, on one host or several",
        target="lmkit_executor_ray.executor:RayExecutor",
        options="lmkit_executor_ray.hooks:Options",
        requires=("ray>=2.60,<3",),
        tier=Tier.REFERENCE,
        stability="experimental",
        platforms=("cpu",),
        max_ranks=1024,
    )


@hookimpl
def lmkit_configure(config: EngineConfig, plan: ResolvedPlan) -> Iterable[ConfigProposal]:
    executor = plan.choice("executor")
    if executor is not None and executor.name == "ray":
        yield from steps_in_flight(config)
