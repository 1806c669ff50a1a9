"""Adapters for plugins written for the previous interface of their kind.

`lmkit.api.INTERFACES` numbers the interface of each kind. The core accepts the current number N, and N-1 when an
adapter for it stands here: a function from the plugin's object to an object of interface N. Adapters are removed after
two minor releases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmkit.api import INTERFACES, PluginError

Adapter = Callable[[Any], Any]

ADAPTERS: dict[tuple[str, int], Adapter] = {}  # (kind, interface of the plugin) -> adapter; a table, filled by source


def supported(kind: str) -> tuple[int, ...]:
    """Interface numbers of `kind` that this core can use, newest first."""
    current = INTERFACES[kind]
    return (current, current - 1) if (kind, current - 1) in ADAPTERS else (current,)


def adapt(kind: str, interface: int, target: Any) -> Any:
    """`target`, written for `interface`, as an object of the current interface of `kind`."""
    if interface == INTERFACES[kind]:
        return target
    if interface not in supported(kind):
        raise PluginError(f"{kind} interface {interface} is not supported (supported: {supported(kind)})")
    return ADAPTERS[kind, interface](target)
