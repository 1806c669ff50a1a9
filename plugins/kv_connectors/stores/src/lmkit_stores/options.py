"""Options that every connector has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How long to wait, and how much to keep on the way."""

    seconds: float = 5.0  # that a request waits for its blocks at most
    pause: float = 10.0  # seconds for which a store that failed or was too slow is left alone
    memory: int = 256  # MiB of blocks on their way to the store, and as much on their way from it
    events: str = ""  # address at which KV events are published, such as tcp://127.0.0.1:5557
    events_topic: str = ""  # first part of each KV event message
    events_replay: str = ""  # address at which subscribers ask for KV events that they missed

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= 600 or not 0 <= self.pause <= 3600:
            raise ValueError(
                f"seconds is {self.seconds} and pause {self.pause}, need 0 < seconds <= 600, pause <= 3600"
            )
        if not 1 <= self.memory <= 1 << 20:
            raise ValueError(f"memory is {self.memory} MiB, needs 1 to 1048576")
        if (self.events_topic or self.events_replay) and not self.events:
            raise ValueError("events_topic and events_replay need events, the address to publish at")
