"""What a resolved plan names."""

from __future__ import annotations

from typing import Any

from lmkit.api import Choice, PluginError, ResolvedPlan, make_target


def choice_of(resolved: ResolvedPlan, kind: str) -> Choice:
    """The plan's choice of `kind`. Raises PluginError where there is none."""
    choice = resolved.choice(kind)
    if choice is None:
        raise PluginError(f"the resolved plan has no choice of kind {kind!r}")
    return choice


def make(choice: Choice, *args: Any) -> Any:
    """An instance of the chosen implementation, with its options. Raises PluginError, which names the plugin."""
    return make_target(choice, *args)
