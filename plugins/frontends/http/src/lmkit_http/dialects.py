"""Which dialects are spoken: all that are installed. Two that want the same route are a mistake of the installation,
unless a header tells whose a request is.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from lmkit.api import ErrorInfo, PluginError
from lmkit.front.dialect import Dialect, error_json
from lmkit.plugins.host import PluginHost
from lmkit.plugins.refs import call, load_ref
from starlette.routing import Match, Route
from starlette.types import Scope

KIND = "dialect"
_ROUTE = re.compile(r"(GET|POST|PUT|PATCH|DELETE) (/\S*)")
log = logging.getLogger("lmkit.server")


def load_dialects(host: PluginHost) -> list[Dialect]:
    """Made of the installed plugins, in order of their names. One that cannot be loaded is logged and not spoken.

    Raises PluginError when two want the same route.
    """
    spoken: dict[tuple[str, str | None], str] = {}  # route, mark -> who
    dialects = []
    for entry in host.entries(KIND):
        if entry.state in ("disabled", "shadowed"):
            continue
        owner = f"{KIND} {entry.name!r} ({entry.dist} {entry.version})"
        try:
            spec = host.load(KIND, entry.name, entry.dist)
            dialect: Dialect = call(owner, load_ref(spec.target, owner))
            if not isinstance(dialect, Dialect) or not (routes := dialect.routes + dialect.light_routes):
                raise PluginError(f"{owner}: {spec.target} is no Dialect with routes")
            for route in routes:
                if not _ROUTE.fullmatch(route):
                    raise PluginError(f"{owner}: {route!r} is no route", fix="write it like 'POST /path/{name}'")
        except Exception as error:
            log.warning("%s is not spoken: %s", owner, error)
            continue
        for route in routes:
            other = spoken.setdefault((route, dialect.mark), owner)
            if other != owner:
                fix = f"uninstall or disable one: {entry.dist}"
                raise PluginError(f"{owner} and {other} both answer {route}", fix=fix)
        dialects.append(dialect)
    return dialects


@cache
def installed_dialects() -> tuple[Dialect, ...]:
    """Those of this environment, for whoever has no plugin host of its own."""
    return tuple(load_dialects(PluginHost()))


class SpokenRoute(Route):
    """A route of a dialect. `marked`: for those requests only that have the dialect's mark."""

    def __init__(self, route: str, handler: Callable[..., Any], dialect: Dialect, marked: bool) -> None:
        method, path = route.split(" ")
        super().__init__(path, handler, methods=[method])
        self.dialect, self._marked = dialect, marked

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if self._marked and not _has_mark(scope, self.dialect):
            return Match.NONE, {}
        return super().matches(scope)


def spoken_routes(
    dialects: Sequence[Dialect], others: Sequence[Route], handler: Callable[[Dialect, str], Callable[..., Any]]
) -> Iterator[Route]:
    """All routes, first those that win. `others` are the server's own.

    With its mark a request is a dialect's wherever one of its routes matches, without it where no other route does.
    """
    routes = [(dialect, route) for dialect in dialects for route in dialect.routes + dialect.light_routes]
    made = [(dialect, route, handler(dialect, route)) for dialect, route in routes]
    yield from (SpokenRoute(route, run, dialect, True) for dialect, route, run in made if dialect.mark)
    yield from (SpokenRoute(route, run, dialect, False) for dialect, route, run in made if not dialect.mark)
    yield from others
    yield from (SpokenRoute(route, run, dialect, False) for dialect, route, run in made if dialect.mark)


def error_writer(dialects: Sequence[Dialect], routes: Sequence[Any], scope: Scope) -> Callable[[ErrorInfo], bytes]:
    """How whoever sent a request reads errors: as the dialect writes them that it has the mark of, or the route."""
    marked = next((dialect for dialect in dialects if _has_mark(scope, dialect)), None)
    if marked is not None:
        return marked.error
    found = next((route for route in routes if route.matches(scope)[0] is not Match.NONE), None)
    return found.dialect.error if isinstance(found, SpokenRoute) else error_json


def _has_mark(scope: Scope, dialect: Dialect) -> bool:
    return dialect.mark is not None and any(name.decode("latin-1") == dialect.mark for name, _ in scope["headers"])
