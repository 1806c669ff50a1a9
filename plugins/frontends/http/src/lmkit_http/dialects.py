"""Which dialects are spoken: all that are installed. Two that want the same route are a mistake of the installation,
unless a header tells whose a request is.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

from lmkit.api import ConfigError, ErrorInfo, PluginError
from lmkit.plugins.host import PluginHost
from lmkit.plugins.options import parse_options
from lmkit.plugins.refs import call, load_ref
from starlette.routing import Match, Route
from starlette.types import Scope

from lmkit_http.dialect import Answer, Dialect, Exchange, Incoming, Served, error_json
from lmkit_http.errors import HttpError

KIND = "dialect"
_ROUTE = re.compile(r"(GET|POST|PUT|PATCH|DELETE) (/\S*)")
log = logging.getLogger("lmkit.server")


def load_dialects(
    host: PluginHost,
    options: Mapping[str, Mapping[str, object]] | None = None,
    elsewhere: Callable[[type[Dialect]], Dialect] | None = None,
) -> list[Dialect]:
    """Made of the installed plugins, in order of their names. One that cannot be loaded is logged and not spoken.

    `options`: of plugins, by "kind.name". `elsewhere`: what stands for those that keep something, where another process
    has them. Raises PluginError when two want the same route, ConfigError for options.
    """
    spoken: dict[tuple[str, str | None], str] = {}  # route, mark -> who
    dialects = []
    for entry in host.entries(KIND):
        if entry.state in ("disabled", "shadowed"):
            continue
        owner = f"{KIND} {entry.name!r} ({entry.dist} {entry.version})"
        try:
            spec = host.load(KIND, entry.name, entry.dist)
            own = parse_options(KIND, spec, (options or {}).get(f"{KIND}.{entry.name}", {}))
            target = load_ref(spec.target, owner)
            if elsewhere is not None and getattr(target, "keeps", True) and hasattr(target, "routes"):
                make = partial(elsewhere, target)
            else:
                make = partial(target, **own)
            dialect: Dialect = call(owner, make)
            if not isinstance(dialect, Dialect) or not (routes := dialect.routes + dialect.light_routes):
                raise PluginError(f"{owner}: {spec.target} is no Dialect with routes")
            for route in routes:
                if not _ROUTE.fullmatch(route):
                    raise PluginError(f"{owner}: {route!r} is no route", fix="write it like 'POST /path/{name}'")
        except ConfigError:
            raise
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


def installed_dialects() -> list[Dialect]:
    """Those of this environment, made anew: what one keeps is its server's."""
    return load_dialects(_host())


@cache
def _host() -> PluginHost:
    """The plugins that are installed, for whoever has no host of its own."""
    return PluginHost()


class SpokenRoute(Route):
    """A route of a dialect. `marked`: for those requests only that have the dialect's mark."""

    def __init__(self, route: str, handler: Callable[..., Any], dialect: Dialect, marked: bool) -> None:
        method, path = route.split(" ")
        super().__init__(path, handler, methods=[method])
        self.dialect, self._marked = dialect, marked
        self._place = None if "{" in path else path

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if self._place not in (None, scope["path"]) and not scope.get("root_path"):
            return Match.NONE, {}  # as the rest would say, later: a refusal must cost little
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


def parsed(
    dialects: Sequence[Dialect], dialect: Dialect, incoming: Incoming, served: Served
) -> tuple[Dialect, Exchange | Answer]:
    """What a request means, and whose it is: what a dialect makes of it for another one is that one's.

    Raises RequestError.
    """
    found = dialect.parse(incoming, served)
    if isinstance(found, Incoming):
        dialect = speaker(dialects, found.route)
        found = dialect.parse(found, served)
        assert not isinstance(found, Incoming), "handed on twice"
    return dialect, found


def speaker(dialects: Sequence[Dialect], route: str) -> Dialect:
    """Who speaks a route. Raises HttpError."""
    for dialect in dialects:
        if route in dialect.routes + dialect.light_routes:
            return dialect
    raise HttpError(404, "not-found", f"there is no route {route}")


def error_writer(dialects: Sequence[Dialect], routes: Sequence[Any], scope: Scope) -> Callable[[ErrorInfo], bytes]:
    """How whoever sent a request reads errors: as the dialect writes them that it has the mark of, or the route."""
    marked = next((dialect for dialect in dialects if _has_mark(scope, dialect)), None)
    if marked is not None:
        return marked.error
    found = next((route for route in routes if route.matches(scope)[0] is not Match.NONE), None)
    return found.dialect.error if isinstance(found, SpokenRoute) else error_json


def _has_mark(scope: Scope, dialect: Dialect) -> bool:
    return dialect.mark is not None and any(name.decode("latin-1") == dialect.mark for name, _ in scope["headers"])
