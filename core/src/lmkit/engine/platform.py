"""What the chosen platform wants of the process that runs an engine. Asked in the parent, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkit.api import guard, make_target, owner_of

if TYPE_CHECKING:
    from lmkit.api import Platform, ResolvedPlan
    from lmkit.config import EngineConfig


def platform_environment(config: EngineConfig, resolved: ResolvedPlan) -> dict[str, str]:
    """Variables to set before torch is imported: threads, how they wait, affinity."""
    choice = resolved.choice("platform")
    if choice is None:
        return {}
    platform: Platform = make_target(choice)
    with guard(owner_of(choice), "worker_env"):
        return platform.worker_env(config, 0)
