"""What is asked of a running server."""

from __future__ import annotations

import json
import time
from contextlib import suppress

import httpx
from lmkit.api import ConfigError, EngineError

from lmkit_top.figures import Snapshot, read

TIMEOUT = 10.0  # seconds
MAX_BYTES = 16 << 20  # of an answer


class Server:
    """One server. Use it in a `with`."""

    def __init__(self, url: str, api_key: str = "") -> None:
        """Raises ConfigError when `url` is none."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no address of a server", fix="write http://HOST:PORT")
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(headers=headers, timeout=TIMEOUT)

    def look(self) -> Snapshot:
        """Raises EngineError when the server does not say."""
        data = self.get("/metrics", "give --api-key KEY, or start the server with --open-path /metrics")
        try:
            return read(data.decode(), time.monotonic())
        except ValueError as e:
            raise self._unreadable("/metrics", e) from e

    def get(self, path: str, key_fix: str) -> bytes:
        """The body of an answer. Raises EngineError, in the server's words where it has some; `key_fix`: what to do
        when it wants a key."""
        try:
            with self._http.stream("GET", self.url + path) as answer:
                if answer.status_code in (401, 403):
                    raise EngineError(f"{self.url}{path} wants a key", fix=key_fix)
                data = bytearray()
                for piece in answer.iter_bytes():
                    data += piece
                    if len(data) > MAX_BYTES:
                        raise ValueError(f"it has more than {MAX_BYTES} bytes")
                if answer.is_error:
                    with suppress(ValueError, TypeError, LookupError):
                        error = json.loads(data)["error"]
                        raise EngineError(str(error["message"]), fix=str(error.get("fix") or ""))
                answer.raise_for_status()
                return bytes(data)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as e:
            raise self._unreadable(path, e) from e

    def _unreadable(self, path: str, e: Exception) -> EngineError:
        return EngineError(
            f"{self.url}{path} cannot be read: {str(e) or type(e).__name__}",
            fix="check the address, and that the server is running: lmkit serve MODEL",
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
