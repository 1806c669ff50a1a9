"""Where the server listens: an address or a Unix socket, with TLS or without, at the root of a site or below it."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import socket
import ssl
import stat
from pathlib import Path

from lmkit.api import ConfigError
from starlette.types import ASGIApp, Receive, Scope, Send

from lmkit_http.settings import ServerSettings

_LOOK = 5.0  # seconds between looks at the files of the certificate
_UDS_MODE = 0o660  # of a Unix socket: its owner and its group may connect
log = logging.getLogger("lmkit.server")


class PortInUse(ConfigError):
    code = "port-in-use"


def check_address(settings: ServerSettings) -> None:
    """Raises ConfigError for a public address without a key. Who reaches a Unix socket is said by its permissions."""
    if not (settings.uds or settings.api_keys or settings.insecure or is_loopback(settings.host)):
        raise ConfigError(
            f"{settings.host} can be reached by others, and there is no API key",
            fix="set --api-key KEY, bind to 127.0.0.1, or say --insecure",
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def bind(settings: ServerSettings) -> socket.socket:
    """The listening socket, bound before anything slow is started. Raises PortInUse, ConfigError."""
    check_address(settings)
    if settings.uds:
        return _bind_path(settings.uds)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1" if settings.host == "localhost" else settings.host.strip("[]"), settings.port))
        sock.set_inheritable(False)
    except OSError as e:
        sock.close()
        if e.errno == errno.EADDRINUSE:
            raise PortInUse(f"port {settings.port} is in use", fix="stop the other server or choose --port") from e
        raise ConfigError(f"cannot listen on {settings.host}:{settings.port}: {e.strerror}", fix="check --host") from e
    return sock


def bind_beside(settings: ServerSettings, sock: socket.socket) -> list[socket.socket]:
    """A socket at the other address of `localhost`, at the same port, if there is IPv6 and the port is free."""
    if settings.uds or settings.host != "localhost" or not socket.has_ipv6:
        return []
    second = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    try:
        second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        second.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        second.bind(("::1", sock.getsockname()[1]))
    except OSError as e:
        log.info("not listening on ::1: %s", e.strerror)
        second.close()
        return []
    second.set_inheritable(False)
    return [second]


def _bind_path(path: str) -> socket.socket:
    """A socket that a server left behind is replaced; one that is in use, or a file of another kind, is not."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.lexists(path):
            _remove_left(path)
        sock.bind(path)
        os.chmod(path, _UDS_MODE)  # nobody can connect before it listens
    except OSError as e:
        sock.close()
        raise ConfigError(f"cannot listen on {path}: {e.strerror or e}", fix="check --uds and its folder") from e
    except ConfigError:
        sock.close()
        raise
    return sock


def _remove_left(path: str) -> None:
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise ConfigError(f"{path} is a file, and no socket", fix="name another path with --uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise PortInUse(f"{path} is in use", fix="stop the other server or choose another --uds")


def release(sock: socket.socket) -> None:
    """Closes the listening socket; a path that is still its own goes, too."""
    path = sock.getsockname() if sock.family == socket.AF_UNIX and sock.fileno() >= 0 else ""
    sock.close()
    if path:
        Path(path).unlink(missing_ok=True)


def url_of(sock: socket.socket, settings: ServerSettings) -> str:
    """The address of the server as its first screen shows it; of a Unix socket the path stands in curl's option."""
    scheme, root = "https" if settings.tls_cert else "http", settings.root_path
    if sock.family == socket.AF_UNIX:
        return f"{scheme}://localhost{root}"
    host, port = sock.getsockname()[:2]
    return f"{scheme}://{'[' + host + ']' if ':' in host else host}:{port}{root}"


class Certificate:
    """A certificate with its key, in files that may be renewed: new connections then get the new one."""

    def __init__(self, cert: str, key: str) -> None:
        """Raises ConfigError."""
        self._files = (cert, key)
        self._seen = self._state()
        self.context = self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def _state(self) -> tuple[tuple[int, int, int] | None, ...]:
        """What changes with the files: kept links, as of mounted secrets, are followed."""
        found: list[tuple[int, int, int] | None] = []
        for name in self._files:
            try:
                s = os.stat(name)
                found.append((s.st_mtime_ns, s.st_ino, s.st_size))
            except OSError:
                found.append(None)
        return tuple(found)

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        cert, key = self._files
        try:
            context.load_cert_chain(cert, key, password=_no_password)
        except (OSError, ValueError) as e:  # SSLError is an OSError
            raise ConfigError(
                f"the certificate {cert} with the key {key} cannot be used: {e}",
                fix="check --tls-cert and --tls-key: PEM files that belong together, the key without a password",
            ) from e
        return context

    def look(self) -> bool:
        """Takes changed files over where they are good, else goes on with the old ones. True: they were taken over."""
        state = self._state()
        if state == self._seen:
            return False
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # not into the one in use: half of a pair would stay
            self._load(self.context)
        except ConfigError as e:
            log.warning("%s; connections go on with the one before", e.message)
            self._seen = state
            return False
        self._seen = state
        log.info("a new certificate was taken over")
        return True

    async def watch(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await asyncio.sleep(_LOOK)
            await asyncio.to_thread(self.look)


def _no_password() -> str:
    """Without it OpenSSL would ask on the terminal, and the start would wait for ever."""
    raise ValueError("the key has a password")


class RootPath:
    """ASGI: below `root` of a site everything is where it is at the root of one. Whether the proxy in front removes
    that part of the path makes no difference."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app, self._root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and (path == self._root or path.startswith(self._root + "/")):
            scope = {**scope, "path": path[len(self._root) :] or "/"}
            scope["raw_path"] = scope["path"].encode()
        await self._app(scope, receive, send)
