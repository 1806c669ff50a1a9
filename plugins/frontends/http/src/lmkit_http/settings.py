"""What the server is told; the engine's configuration is separate."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from lmkit.api import ConfigError

# probes of orchestrators, routers and hosts of containers, which have no key; all else needs one when there is one
OPEN_PATHS = frozenset({"/live", "/ready", "/health", "/ping"})
OPENABLE = ("/metrics", "/version", "/load")  # what says nothing of prompts, models or clients


@dataclass(frozen=True)
class ServerSettings:
    """Limits are per request unless they say otherwise. Raises ConfigError for a key that would open to anyone."""

    host: str = "localhost"  # 127.0.0.1, and ::1 where there is IPv6
    port: int = 8000
    uds: str = ""  # path of a Unix socket to listen on instead
    tls_cert: str = ""  # file, PEM: the certificate and those that vouch for it; "": plain HTTP
    tls_key: str = ""  # file, PEM
    root_path: str = ""  # where a site has this server: /llm; "": at its root
    api_workers: int = 1  # processes that answer HTTP; with several another one has the engine
    api_keys: tuple[str, ...] = ()  # any of them opens everything but what takes an administrator's
    admin_keys: tuple[str, ...] = ()  # these open everything
    open_paths: tuple[str, ...] = ()  # of OPENABLE, those that need no key
    open_priority: bool = False  # every client may ask to be served before others
    cors_origins: tuple[str, ...] = ()  # sites whose pages may ask, beside our own page; '*': all
    insecure: bool = False  # allow a public address without a key
    allowed_hosts: tuple[str, ...] = ()  # accepted Host headers, of .NAME all below it; empty: any, unless:
    local_hosts: bool = False  # only names of this machine and of its networks, beside `allowed_hosts`; addresses pass
    max_body: int | None = None  # bytes; None: what the model can use of one
    max_bodies: int = 64 << 20  # bytes, bodies of all requests that are being read together
    max_headers: int = 64 << 10  # bytes, all headers together
    max_choices: int = 128  # prompts x n
    max_seconds: float | None = None  # from a request to the end of its answer; None: no limit but the client's
    key_requests: int | None = None  # a minute, of each key
    key_tokens: int | None = None  # a minute, of each key: of prompts as they come, of answers as they end
    key_concurrent: int | None = None  # requests of a key that are in at once
    keep_alive: float = 75.0  # seconds that an idle connection is kept: longer than clients and proxies keep theirs
    drain_timeout: float = 30.0  # seconds that running requests get after SIGTERM
    unknown_fields: Literal["warn", "refuse"] = "warn"  # warn: dropped, and named in a header of the answer
    traces: str = ""  # address of an OpenTelemetry collector (OTLP over HTTP); empty: none are made
    profile_dir: str = ""  # where recordings of steps are written; empty: none are made
    served_names: tuple[str, ...] = ()  # of the model, the main one first; empty: as the engine says

    def __post_init__(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("TLS needs a certificate and its key", fix="give both --tls-cert and --tls-key")
        if self.uds and (self.host, self.port) != (ServerSettings.host, ServerSettings.port):
            raise ConfigError("a Unix socket takes the place of an address", fix="leave out --host and --port")
        root = self.root_path
        if root and (not root.startswith("/") or root.endswith("/") or "//" in root or not root.isprintable()):
            raise ConfigError(f"{root!r} is no place on a site", fix="write --root-path like /llm")
        if self.api_workers < 1 or (self.api_workers > 1 and sys.platform == "win32"):
            raise ConfigError(
                f"{self.api_workers} processes cannot answer HTTP here", fix="leave out --api-workers: it is one"
            )
        for path in self.open_paths:
            if path not in OPENABLE and path not in OPEN_PATHS:
                raise ConfigError(
                    f"{path!r} always needs the key", fix=f"only these can be open: {', '.join(OPENABLE)}"
                )
        for name in ("keep_alive", "max_seconds", "key_requests", "key_tokens", "key_concurrent"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}", fix="give a positive number, or leave it out: no limit")
        for key in (*self.api_keys, *self.admin_keys):
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                what = "empty" if not key.strip() else "not plain text without blanks"
                raise ConfigError(f"an API key is {what}", fix="check the variable it comes from; nothing is served")

    def __repr__(self) -> str:
        num = len(self.api_keys) + len(self.admin_keys)
        keys = f"{num} hidden" if num else "none"
        return f"ServerSettings(host={self.host!r}, port={self.port}, api_keys={keys})"
