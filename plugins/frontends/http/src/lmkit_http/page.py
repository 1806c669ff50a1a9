"""The page at /: it talks to the server that sent it, and asks for the key where one is needed.

One answer with everything in it: a browser that has no key yet may load nothing else.
"""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib import resources

from starlette.responses import Response
from starlette.types import Scope

SCRIPTS = ("common", "talk", "engine", "plugins", "start")  # in the order in which they run


@cache
def _content() -> tuple[bytes, str]:
    """The page, and the policy that lets a browser run this script and no other."""
    files = resources.files("lmkit_http").joinpath("page")
    style, html = (files.joinpath(name).read_text("utf-8") for name in ("style.css", "index.html"))
    script = "\n".join(files.joinpath(f"{name}.js").read_text("utf-8") for name in SCRIPTS)
    allowed = "'sha256-" + b64encode(sha256(script.encode()).digest()).decode() + "'"
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; connect-src 'self'; "
    policy += "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    return html.replace("{style}", style).replace("{script}", script).encode(), policy


def page(status: int = 200) -> Response:
    content, policy = _content()
    headers = {"Content-Security-Policy": policy}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(content, status, headers, media_type="text/html")


def wants_page(scope: Scope) -> bool:
    """Whether a browser asked for the page, rather than a client for a route."""
    accept = next((value for name, value in scope["headers"] if name == b"accept"), b"")
    return scope["path"] == "/" and scope["method"] == "GET" and b"text/html" in accept
