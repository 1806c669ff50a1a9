"""Several keys are several tenants: the engine shares its steps among them unless the user chose a scheduler."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkit.plugins.host import PluginHost
    from lmkit_cli.settings import Sourced

SCHEDULER = "fair"


def with_shares(settings: Sourced, keys: Sequence[str], host: PluginHost) -> Sourced:
    """`settings` with the scheduler that shares among keys, where there are several, none is named and it is there."""
    if len(keys) < 2 or settings.config.wants("scheduler") != "auto":
        return settings
    if not any(entry.name == SCHEDULER and entry.state == "ok" for entry in host.entries("scheduler")):
        return settings
    config = replace(settings.config, wanted={**settings.config.wanted, "scheduler": SCHEDULER})
    sources = {**settings.sources, "sched.policy": f"{len(keys)} API keys"}
    return replace(settings, config=config, sources=sources)
