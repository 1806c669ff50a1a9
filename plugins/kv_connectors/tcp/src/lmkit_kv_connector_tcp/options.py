"""Options of kv_connector.tcp."""

from __future__ import annotations

from dataclasses import dataclass

from lmkit_stores.options import StoreOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(StoreOptions):
    """Beside those of every store."""

    listen: str = ""  # HOST:PORT at which other engines may ask for blocks; port 0: a free one
    peers: str = ""  # engines that are asked, HOST:PORT, several with commas between
    host: int = 1024  # MiB of memory for blocks that others may ask for

    def __post_init__(self) -> None:
        StoreOptions.__post_init__(self)
        for address in self.addresses + ([self.listen] if self.listen else []):
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or int(port) > 65535:
                raise ValueError(f"{address!r} is not HOST:PORT")
        if self.host < 1:
            raise ValueError(f"host is {self.host} MiB, needs at least 1")

    @property
    def addresses(self) -> list[str]:
        return [part.strip() for part in self.peers.split(",") if part.strip()]
