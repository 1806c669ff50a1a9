"""`lmkit split`: one address for engines that compute prompts and engines that write answers."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

import typer
from lmkit.api import ConfigError
from lmkit.config import read_environment
from lmkit_http.settings import ServerSettings


def split(
    prefill: Annotated[list[str], typer.Option(help="URL of a server that computes prompts; repeatable")],
    decode: Annotated[list[str], typer.Option(help="URL of a server that writes answers; repeatable")],
    host: Annotated[str, typer.Option(help="address to listen on; localhost: 127.0.0.1 and ::1")] = ServerSettings.host,
    port: Annotated[int, typer.Option(help="port to listen on", min=0, max=65535)] = 8000,
    min_bytes: Annotated[int, typer.Option(help="shorter requests go to a decode server at once", min=0)] = 4096,
    prefill_seconds: Annotated[float, typer.Option(help="that a prompt may take at most", min=0.1)] = 60.0,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="key that clients must send, and that the servers know; repeatable; also LMKIT_API_KEY"),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="allow a public address without a key")] = False,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="accepted Host header, .NAME with all below it; repeatable")
    ] = None,
    tls_cert: Annotated[str, typer.Option(help="PEM file: certificate with its chain")] = "",
    tls_key: Annotated[str, typer.Option(help="PEM file: the key of the certificate")] = "",
    keep_alive: Annotated[
        float, typer.Option(help="seconds that an idle connection is kept", min=1)
    ] = ServerSettings.keep_alive,
) -> None:
    """One address for servers that compute prompts and servers that write answers.

    Keys are checked here and passed on to the servers, which check them as well where they have any.

    Example: lmkit split --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002
    """
    for url in (*prefill, *decode):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            raise ConfigError(f"{url!r:.200} is no URL of a server", fix="http://HOST:PORT")
    from lmkit_http.bounded import serve_bounded

    from lmkit_split.app import Server, Split, make_app

    key = read_environment().switch("LMKIT_API_KEY")
    settings = ServerSettings(
        host=host,
        port=port,
        api_keys=tuple(api_key or ([key] if key else ())),
        insecure=insecure,
        allowed_hosts=tuple(allowed_host or ()),
        tls_cert=tls_cert,
        tls_key=tls_key,
        keep_alive=keep_alive,
    )
    prefills, decodes = ([Server(url.rstrip("/")) for url in urls] for urls in (prefill, decode))
    front = Split(prefills, decodes, min_bytes, prefill_seconds)
    serve_bounded(make_app(front), settings, front.client.aclose)
