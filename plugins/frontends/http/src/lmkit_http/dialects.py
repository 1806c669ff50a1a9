"""Which dialects are spoken: all that are installed.

A route of lmkit's own stays its own: a third-party dialect that wants it too goes without it, with a warning. Two
third-party dialects that want the same route are a mistake of the installation, unless a header tells whose a request
is.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from lmkit.api import Choice, ConfigError, ErrorInfo, PluginError, blame, guard, is_interrupt
from lmkit.contracts.guard import LOGGED
from lmkit.plugins.host import PluginHost
from lmkit.plugins.options import parse_options
from lmkit.plugins.refs import load_ref
from starlette.routing import Match, Route, compile_path
from starlette.types import Scope

from lmkit_http.dialect import Answer, Dialect, Exchange, Incoming, Served, error_json
from lmkit_http.error_bodies import written_error
from lmkit_http.errors import HttpError

if TYPE_CHECKING:
    from lmkit_http.backend import Backend

KIND = "dialect"
_ROUTE = re.compile(r"(GET|POST|PUT|PATCH|DELETE) (/\S*)")
_PARAMETER = re.compile(r"\{[^{}]*\}")
_COMMON_HEADERS = frozenset({  # sent by clients of any dialect, so that they tell none from another
    "accept", "accept-encoding", "accept-language", "authorization", "cache-control", "connection", "content-encoding",
    "content-length", "content-type", "cookie", "expect", "forwarded", "host", "origin", "referer", "te",
    "traceparent", "transfer-encoding", "user-agent", "via", "x-api-key", "x-forwarded-for", "x-forwarded-host",
    "x-forwarded-proto", "x-real-ip", "x-request-id",
})  # fmt: skip
log = logging.getLogger("lmkit.server")


def load_dialects(
    host: PluginHost,
    options: Mapping[str, Mapping[str, object]] | None = None,
    elsewhere: Callable[[type[Dialect]], Dialect] | None = None,
) -> list[Dialect]:
    """Made of the installed plugins, lmkit's own first, then in order of names. One that cannot be loaded is logged and
    not spoken; nor are routes of a third-party dialect that are lmkit's own.

    `options`: of plugins, by "kind.name". `elsewhere`: what stands for those that keep something, where another process
    has them. Raises PluginError when two third-party dialects want the same route, ConfigError for options.
    """
    spoken: dict[tuple[str, str | None], str] = {}  # route, mark -> who
    taken = server_routes()
    dialects = []
    for entry in sorted(host.entries(KIND), key=lambda entry: not entry.official):
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
            with guard(owner, "the constructor"):
                dialect: Dialect = make()
            if not isinstance(dialect, Dialect):
                raise PluginError(f"{owner}: {spec.target} is no Dialect with routes")
            check_routes(owner, dialect)
            dialect.choice = Choice(KIND, "", entry.name, spec.target, entry.dist, entry.version, entry.module)
            dialect.third_party = not entry.official
            if dialect.third_party:
                _leave_taken_routes(owner, dialect, taken)
        except ConfigError:
            raise
        except Exception as error:
            log.warning("%s is not spoken: %s", owner, error)
            continue
        for route in dialect.routes + dialect.light_routes:
            other = spoken.setdefault((route, dialect.mark), owner)
            if other != owner:
                raise PluginError(
                    f"{owner} and {other} both answer {route}",
                    fix=f"uninstall {entry.dist}, or start without it: LMKIT_PLUGINS_DISABLE={entry.key}",
                )
            if entry.official:
                taken.append((route, dialect.mark, owner))
        dialects.append(dialect)
    return dialects


TakenRoute = tuple[str, str | None, str]  # route, mark, who answers it


def server_routes() -> list[TakenRoute]:
    """The routes that the server answers without any dialect."""
    from lmkit_http import info_routes, life_routes

    paths = [*info_routes.routes(None), *life_routes.routes(None)]
    return [(f"{method} {path}", None, "the server") for path, methods, _ in paths for method in methods]


def check_routes(owner: str, dialect: Dialect | type[Dialect]) -> None:
    """Raises PluginError where a dialect has no routes, one that is none, or a mark that every client sends."""
    routes = dialect.routes + dialect.light_routes
    if not routes:
        raise PluginError(f"{owner}: it is no Dialect with routes")
    for route in routes:
        if not _ROUTE.fullmatch(route):
            raise PluginError(f"{owner}: {route!r} is no route", fix="write it like 'POST /path/{name}'")
    if dialect.mark in _COMMON_HEADERS:
        raise PluginError(
            f"{owner}: its mark is {dialect.mark!r}, a header that clients of other dialects send too",
            fix="use a header that only clients of this dialect send",
        )


def taken_by(route: str, mark: str | None, taken: Sequence[TakenRoute]) -> str | None:
    """The owner of a route that a third-party dialect's route could match; None: nobody answers there.

    A request that carries the dialect's mark is its own, wherever nobody else has that mark.
    """
    method, path = route.split(" ", 1)
    example = _PARAMETER.sub(lambda parameter: "lm/kit" if parameter[0].endswith(":path}") else "lmkit", path)
    for other, its_mark, owner in taken:
        its_method, its_path = other.split(" ", 1)
        if its_method == method and mark in (None, its_mark) and compile_path(its_path)[0].match(example):
            return owner
    return None


def _leave_taken_routes(owner: str, dialect: Dialect, taken: Sequence[TakenRoute]) -> None:
    """Takes from a third-party dialect the routes that are lmkit's own. Raises PluginError where that leaves none."""
    left = set()
    for route in dialect.routes + dialect.light_routes:
        if (other := taken_by(route, dialect.mark, taken)) is not None:
            log.warning("%s wants %s, which %s answers: it stays with lmkit's own", owner, route, other)
        else:
            left.add(route)
    for name in ("routes", "light_routes"):  # of the object: the class is the plugin's
        setattr(dialect, name, tuple(route for route in getattr(dialect, name) if route in left))
    if not left:
        raise PluginError("lmkit's own dialects answer all of its routes")


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
    What third-party dialects match beside a route of lmkit's own, by parameters in their paths, stays lmkit's own.
    """
    routes = [(dialect, route) for dialect in dialects for route in dialect.routes + dialect.light_routes]
    made = [(dialect, route, handler(dialect, route)) for dialect, route in routes]
    yield from (SpokenRoute(route, run, dialect, True) for dialect, route, run in made if dialect.mark)
    unmarked = [(dialect, SpokenRoute(route, run, dialect, False)) for dialect, route, run in made]
    yield from (route for dialect, route in unmarked if not dialect.mark and not dialect.third_party)
    yield from others
    yield from (route for dialect, route in unmarked if dialect.mark and not dialect.third_party)
    yield from (route for dialect, route in unmarked if not dialect.mark and dialect.third_party)
    yield from (route for dialect, route in unmarked if dialect.mark and dialect.third_party)


def parsed(
    dialects: Sequence[Dialect], dialect: Dialect, incoming: Incoming, served: Served
) -> tuple[Dialect, Exchange | Answer]:
    """What a request means, and whose it is: what a dialect makes of it for another one is that one's.

    Raises RequestError.
    """
    found = _parsed(dialect, incoming, served)
    if isinstance(found, Incoming):
        handed_on_by, dialect = dialect, speaker(dialects, found.route)
        found = _parsed(dialect, found, served)
        if isinstance(found, Incoming):
            raise PluginError(f"{handed_on_by.owner}: what it handed on was handed on again", fix=LOGGED)
    return dialect, found


def _parsed(dialect: Dialect, incoming: Incoming, served: Served) -> Exchange | Answer | Incoming:
    """Parses a request with its dialect. Raises RequestError, or PluginError for a dialect that is at fault."""
    with guard(dialect.owner, "parse"):
        found = dialect.parse(incoming, served)
    if not isinstance(found, Exchange | Answer | Incoming):
        log.error("%s: parse gave %r", dialect.owner, found)
        needed = "no Exchange, Answer or Incoming"
        raise PluginError(f"{dialect.owner}: parse gave a {type(found).__name__}, {needed}", fix=LOGGED)
    return found


def blamed(error: BaseException, dialect: Dialect, backend: Backend) -> BaseException:
    """The error, or one that names the plugin whose code raised it: the dialect, or one of the model's text side.

    Raises the error where it is none of a request: somebody wants the server to end.
    """
    if is_interrupt(error):
        raise error
    choices = backend.text.choices if dialect.choice is None else (dialect.choice, *backend.text.choices)
    found = blame(error, choices)
    if found is not error:
        log.error("%s", found, exc_info=error)
    return found


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
        return partial(written_error, marked)
    found = next((route for route in routes if route.matches(scope)[0] is not Match.NONE), None)
    return partial(written_error, found.dialect) if isinstance(found, SpokenRoute) else error_json


def _has_mark(scope: Scope, dialect: Dialect) -> bool:
    return dialect.mark is not None and any(name.decode("latin-1") == dialect.mark for name, _ in scope["headers"])
