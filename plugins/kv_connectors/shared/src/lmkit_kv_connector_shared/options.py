"""Options of kv_connector.shared."""

from __future__ import annotations

from dataclasses import dataclass

from lmkit_stores.options import StoreOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(StoreOptions):
    """Beside those of every store."""

    folder: str = "~/.cache/lmkit/kv"  # on a local disk, or on one that several hosts see
    size: int = 16384  # MiB that the folder may hold

    def __post_init__(self) -> None:
        StoreOptions.__post_init__(self)
        if not self.folder or self.size < 1:
            raise ValueError(f"folder is {self.folder!r} and size {self.size} MiB: a path, and at least 1")
