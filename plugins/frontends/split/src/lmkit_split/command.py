"""`lmkit split`: one address for engines that compute prompts and engines that write answers."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

import typer
from lmkit.api import ConfigError


def split(
    prefill: Annotated[list[str], typer.Option(help="URL of a server that computes prompts; repeatable")],
    decode: Annotated[list[str], typer.Option(help="URL of a server that writes answers; repeatable")],
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on", min=0, max=65535)] = 8000,
    min_bytes: Annotated[int, typer.Option(help="shorter requests go to a decode server at once", min=0)] = 4096,
    prefill_seconds: Annotated[float, typer.Option(help="that a prompt may take at most", min=0.1)] = 60.0,
) -> None:
    """One address for servers that compute prompts and servers that write answers.

    Example: lmkit split --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002
    """
    for url in (*prefill, *decode):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            raise ConfigError(f"{url!r:.200} is no URL of a server", fix="http://HOST:PORT")
    import uvicorn

    from lmkit_split.app import Server, Split, make_app

    prefills, decodes = ([Server(url.rstrip("/")) for url in urls] for urls in (prefill, decode))
    app = make_app(Split(prefills, decodes, min_bytes, prefill_seconds))
    uvicorn.run(app, host=host, port=port, log_level="warning")
