"""The small page at /: it talks to the server that sent it, and asks for the key where one is needed."""

from __future__ import annotations

from functools import cache
from importlib import resources

from starlette.responses import Response
from starlette.types import Scope

_CSP = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


@cache
def _content() -> bytes:
    return resources.files("lmkit_http").joinpath("page.html").read_bytes()


def page(status: int = 200) -> Response:
    headers = {"Content-Security-Policy": _CSP}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(_content(), status, headers, media_type="text/html")


def wants_page(scope: Scope) -> bool:
    """Whether a browser asked for the page, rather than a client for a route."""
    accept = next((value for name, value in scope["headers"] if name == b"accept"), b"")
    return scope["path"] == "/" and scope["method"] == "GET" and b"text/html" in accept
