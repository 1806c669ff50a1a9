"""Who may ask for what: keys of clients, keys of administrators, and pages of other sites.

A client's key opens every route but those that change the server. Those take an administrator's key, wherever there
are keys at all. Two keys are two tenants: neither may see by the clock what the other's prompts begin with.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.types import Scope

from lmkit_http.errors import HttpError
from lmkit_http.settings import OPEN_PATHS, ServerSettings

KEY_HEADERS = frozenset({"authorization", "x-api-key"})
MAX_KEYS = 8  # in the headers of a request; more are not looked at
_READS = ("GET", "HEAD")


@dataclass(frozen=True, slots=True)
class Caller:
    """What a request's key allows. The Gate puts it into the request's scope, the handlers read it there."""

    admin: bool = True  # may change the server
    sooner: bool = True  # may ask to be served before others (a priority below 0)
    tenant: str = ""  # whose prefix cache it is; empty: the one that all share

    def salt(self, own: str | None) -> str | None:
        """The salt of the prefix cache for a request that asked for `own`."""
        return f"{self.tenant}/{own or ''}" if self.tenant else own

    def need_admin(self, what: str) -> None:
        """Raises HttpError."""
        if not self.admin:
            raise HttpError(
                403, "admin-key", f"{what} needs an administrator's key", fix="start the server with --admin-key KEY"
            )

    def check_priority(self, priority: int | None) -> None:
        """Raises HttpError for a priority that only others may ask for."""
        if priority is not None and priority < 0 and not self.sooner:
            raise HttpError(
                403, "priority", f"priority {priority} would be served before everybody else's requests",
                fix="send 0 or more, or use an administrator's key (--admin-key), or start with --open-priority",
                field="priority",
            )  # fmt: skip


def caller_of(scope: Scope) -> Caller:
    """What the Gate found out about the sender of a request."""
    return scope["state"]["caller"]


class Access:
    """Keys and origins of one server. `check` raises HttpError before anything of a request is looked at."""

    def __init__(self, settings: ServerSettings) -> None:
        self._keys = [_digest(key.encode()) for key in settings.api_keys]
        self._admins = [_digest(key.encode()) for key in settings.admin_keys]
        self._open = OPEN_PATHS | set(settings.open_paths)
        self._origins = frozenset(settings.cors_origins)
        self._open_priority = settings.open_priority
        self._anyone = Caller(admin=not self._admins, sooner=self._open_priority)
        # several keys are several tenants; one key, or none, is one
        self._tenants = [_tenant(d) if len(self._keys) > 1 else "" for d in self._keys]

    def check(self, scope: Scope, keys: list[bytes | None], origin: bytes | None, host: bytes) -> Caller:
        """Who sent it, with `keys` in its headers (see `key_of`). Raises HttpError: 401 without a key that is needed,
        403 for a page of another site."""
        if self._keys:
            caller = self._of_key(keys)
            if caller is None and not (scope["path"] in self._open and scope["method"] in _READS):
                raise HttpError(
                    401, "invalid_api_key", "a valid API key is required", fix="send it as 'Authorization: Bearer KEY'"
                )
            return caller or Caller(False, False)
        # a browser sends what any page tells it to, but names the page's origin; a key would be a proof of intent
        if origin is not None and not self._is_ours(origin, host):
            raise HttpError(403, "origin", "this server does not answer pages of other sites", fix="see --cors-origin")
        return (self._of_key(keys) if self._admins else None) or self._anyone

    def _of_key(self, keys: list[bytes | None]) -> Caller | None:
        """The caller with one right key, whatever else is sent: clients and proxies add keys of other servers. Of
        several right ones an administrator's counts, else the first."""
        digests = [_digest(key or b"") for key in keys[:MAX_KEYS]]
        # all of them are compared: time says nothing
        admin = [hmac.compare_digest(digest, k) for digest in digests for k in self._admins]
        found = [[hmac.compare_digest(digest, k) for k in self._keys] for digest in digests]
        if any(admin):
            return Caller()
        right = next((matches for matches in found if any(matches)), None)
        return None if right is None else Caller(False, self._open_priority, self._tenants[right.index(True)])

    def _is_ours(self, origin: bytes, host: bytes) -> bool:
        text = origin.decode("latin-1")
        if text in self._origins or "*" in self._origins:
            return True
        try:
            parts = urlsplit(text)
        except ValueError:
            return False
        return parts.scheme in ("http", "https") and parts.netloc.lower() == host.decode("latin-1").lower()


def key_of(header: bytes, value: bytes) -> bytes | None:
    """The key in a header of KEY_HEADERS; None: it is written in another way."""
    if header == b"x-api-key":
        return value.strip()
    scheme, _, key = value.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None


def tenants(settings: ServerSettings) -> list[str]:
    """All that callers may be: keys are several tenants where there are several."""
    keys = settings.api_keys if len(settings.api_keys) > 1 else ()
    return ["", *dict.fromkeys(_tenant(_digest(key.encode())) for key in keys)]


def _tenant(digest: bytes) -> str:
    return digest.hex()[:16]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
