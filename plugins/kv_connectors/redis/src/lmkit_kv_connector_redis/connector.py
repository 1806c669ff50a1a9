"""The KV connector `redis`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lmkit_stores import StoreConnector, name_of
from redis import Redis

from lmkit_kv_connector_redis.options import Options

if TYPE_CHECKING:
    from lmkit.api import Checkpoint, KVConfig, KVKey, ResolvedPlan

PREFIX = "lmkit:kv:"
AT_ONCE = 16  # blocks of one question
KNOWN = 4096  # blocks


class Server:
    """Contract: lmkit_stores.Store."""

    def __init__(self, url: str, ttl: int, seconds: float) -> None:
        """Connects when it is first asked: an engine starts without its server, and finds it later."""
        self.ttl = ttl
        self.client = Redis.from_url(url, socket_timeout=seconds, socket_connect_timeout=min(seconds, 2.0))
        self._read: OrderedDict[KVKey, None] = OrderedDict()  # what it had when it was last asked

    def read(self, keys: Sequence[KVKey]) -> Iterator[bytes | None]:
        for first in range(0, len(keys), AT_ONCE):
            part = keys[first : first + AT_ONCE]
            frames: Any = self.client.mget([PREFIX + name_of(key) for key in part])
            for key, frame in zip(part, frames, strict=True):
                if frame is not None:
                    self._read[key] = None
                    while len(self._read) > KNOWN:
                        self._read.popitem(last=False)
                yield frame

    def write(self, key: KVKey, frame: bytes) -> None:
        self.client.set(PREFIX + name_of(key), frame, ex=self.ttl)

    def has(self, key: KVKey) -> bool:
        """What was just read need not be written again."""
        return key in self._read

    def drop(self, key: KVKey) -> None:
        self._read.pop(key, None)
        self.client.delete(PREFIX + name_of(key))

    def close(self) -> None:
        self.client.close()


class RedisConnector(StoreConnector):
    """Blocks in a server that engines on several hosts ask."""

    def __init__(self, checkpoint: Checkpoint, resolved: ResolvedPlan, kv: KVConfig, **options: Any) -> None:
        chosen = Options(**options)
        super().__init__(Server(chosen.url, chosen.ttl, chosen.seconds), checkpoint, resolved, kv, chosen)
