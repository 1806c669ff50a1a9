"""Registers the KV connector `sqlite` and its options."""

from dataclasses import dataclass

from lmkit.api import KVConnectorSpec, Tier, hookimpl
from lmkit_stores.options import StoreOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(StoreOptions):
    """Beside those of every store (how long a request waits, how much is on its way)."""

    file: str = "lmkit-kv.sqlite"
    size: int = 1024  # MiB of blocks in the file

    def __post_init__(self):
        StoreOptions.__post_init__(self)
        if not self.file or self.size < 1:
            raise ValueError(f"file is {self.file!r} and size {self.size} MiB, needs a path, and at least 1 MiB")


@hookimpl
def lmkit_kv_connectors():
    yield KVConnectorSpec(
        name="sqlite",
        interface=1,
        summary="KV blocks in a SQLite file: the next start finds what this one computed",
        target="lmkit_kv_connector_sqlite.connector:SqliteConnector",
        options="lmkit_kv_connector_sqlite.hooks:Options",
        tier=Tier.PORTABLE,
    )
