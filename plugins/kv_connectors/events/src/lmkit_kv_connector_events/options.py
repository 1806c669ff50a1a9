"""Options of kv_connector.events."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The addresses at which KV events are published and replayed."""

    address: str = (
        "tcp://127.0.0.1:5557"  # bound if it is one of this host (tcp://*:5557: all of them), else connected to
    )
    topic: str = ""  # first part of each message
    replay: str = ""  # address at which subscribers ask for events that they missed, such as tcp://127.0.0.1:5558

    def __post_init__(self) -> None:
        if not self.address:
            raise ValueError("address is empty, needs one such as tcp://127.0.0.1:5557")
