"""What the chosen platform wants of the process that runs an engine. Asked in the parent, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkit.plugins import load_target

if TYPE_CHECKING:
    from lmkit.api import Platform, ResolvedPlan
    from lmkit.config import EngineConfig


def platform_environment(config: EngineConfig, resolved: ResolvedPlan) -> dict[str, str]:
    """Variables to set before torch is imported: threads, how they wait, affinity."""
    choice = resolved.choice("platform")
    if choice is None:
        return {}
    platform: Platform = load_target(choice)(**choice.options)
    return platform.worker_env(config, 0)
