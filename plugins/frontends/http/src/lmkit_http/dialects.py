"""Which dialects are spoken: all that are installed. Two that want the same route are a mistake of the installation."""

from __future__ import annotations

import logging
from functools import cache

from lmkit.api import PluginError
from lmkit.front.dialect import Dialect
from lmkit.plugins.host import PluginHost
from lmkit.plugins.refs import call, load_ref

KIND = "dialect"
log = logging.getLogger("lmkit.server")


def load_dialects(host: PluginHost) -> list[Dialect]:
    """Made of the installed plugins, in order of their names. One that cannot be loaded is logged and not spoken.

    Raises PluginError when two want the same route.
    """
    spoken: dict[str, str] = {}  # route -> who
    dialects = []
    for entry in host.entries(KIND):
        if entry.state in ("disabled", "shadowed"):
            continue
        owner = f"{KIND} {entry.name!r} ({entry.dist} {entry.version})"
        try:
            spec = host.load(KIND, entry.name, entry.dist)
            dialect: Dialect = call(owner, load_ref(spec.target, owner))
            if not isinstance(dialect, Dialect) or not dialect.routes:
                raise PluginError(f"{owner}: {spec.target} is no Dialect with routes")
        except Exception as error:
            log.warning("%s is not spoken: %s", owner, error)
            continue
        for route in dialect.routes:
            if route in spoken:
                raise PluginError(
                    f"{owner} and {spoken[route]} both answer {route}", fix=f"uninstall or disable one: {entry.dist}"
                )
            spoken[route] = owner
        dialects.append(dialect)
    return dialects


@cache
def installed_dialects() -> tuple[Dialect, ...]:
    """Those of this environment, for whoever has no plugin host of its own."""
    return tuple(load_dialects(PluginHost()))
