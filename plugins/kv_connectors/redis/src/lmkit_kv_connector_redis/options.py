"""Options of kv_connector.redis."""

from __future__ import annotations

from dataclasses import dataclass

from lmkit_stores.options import StoreOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(StoreOptions):
    """Beside those of every store."""

    url: str = "redis://127.0.0.1:6379/0"  # rediss:// for TLS; unix://PATH
    ttl: int = 86400  # seconds that a block is kept after it was written; how much, the server's maxmemory says

    def __post_init__(self) -> None:
        StoreOptions.__post_init__(self)
        if not self.url.startswith(("redis://", "rediss://", "unix://")) or self.ttl < 1:
            raise ValueError(f"url must begin with redis://, rediss:// or unix://, and ttl be positive: {self.ttl}")
