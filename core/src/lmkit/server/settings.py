"""What the server is told; the engine's configuration is separate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Limits are per request unless they say otherwise."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()  # any of them opens everything but /live and /ready
    insecure: bool = False  # allow a public address without a key
    allowed_hosts: tuple[str, ...] = ()  # accepted Host headers; empty: any, but only local names without a key
    max_body: int = 32 << 20  # bytes
    max_headers: int = 64 << 10  # bytes, all headers together
    max_choices: int = 128  # prompts x n
    drain_timeout: float = 30.0  # seconds that running requests get after SIGTERM
    served_name: str | None = None

    def __repr__(self) -> str:
        keys = f"{len(self.api_keys)} hidden" if self.api_keys else "none"
        return f"ServerSettings(host={self.host!r}, port={self.port}, api_keys={keys})"
