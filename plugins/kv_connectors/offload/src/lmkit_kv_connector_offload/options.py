"""Options of kv_connector.offload."""

from __future__ import annotations

from dataclasses import dataclass

from lmkit_stores.options import StoreOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(StoreOptions):
    """Beside those of every store."""

    host: int = 1024  # MiB of memory for blocks
    folder: str = ""  # for what no longer fits into memory; "": it is given up
    disk: int = 16384  # MiB that the folder may hold

    def __post_init__(self) -> None:
        StoreOptions.__post_init__(self)
        if self.host < 1 or self.disk < 1:
            raise ValueError(f"host is {self.host} MiB and disk {self.disk}, both need at least 1")
