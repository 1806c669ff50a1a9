"""EngineClient: how front ends talk to an engine. `supervisor.ProcessClient` runs it in a process of its own.

Every submitted request yields exactly one finishing event, also when it is aborted and when the engine dies.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Protocol

from lmkit.api import EngineRequest, ErrorInfo, TokenEvent
from lmkit.engine.messages import Act, EngineFacts, EngineStats, SetAdapter
from lmkit.engine.streams import BaseClient, EventStream, State
from lmkit.engine.supervisor import ProcessClient

__all__ = ["BaseClient", "EngineClient", "EventStream", "ProcessClient", "State"]


class EngineClient(Protocol):
    """What a front end may use. All methods are called from one event loop."""

    @property
    def state(self) -> State: ...

    @property
    def failure(self) -> ErrorInfo | None:
        """Why the state is "dead", unless it was closed."""

    @property
    def ended(self) -> bool:
        """The state is "dead" and will stay so."""

    @property
    def responsive(self) -> bool:
        """Whether the engine answers in the time that it usually takes. One that does not may be a dead one soon."""

    @property
    def facts(self) -> EngineFacts:
        """From start() on."""

    async def start(self) -> None:
        """Returns when the engine is ready; raises what prevented that, typed."""

    def submit(self, request: EngineRequest) -> AsyncIterator[TokenEvent]: ...
    def abort(self, ids: Iterable[str]) -> None:
        """Ends streams with finish="abort" and frees their blocks. Idempotent; unknown ids are ignored."""

    def abort_all(self) -> None: ...
    async def stats(self) -> EngineStats: ...
    async def set_adapter(self, name: str, path: str | None) -> None:
        """Loads the adapter at `path` as `name`, or forgets `name`. Raises what prevents it."""

    async def change(self, what: SetAdapter | Act) -> None:
        """What is done between two steps: see messages. Raises what prevents it."""

    def drain(self) -> None:
        """Refuse new requests (EngineBusy); running ones go on."""

    async def close(self) -> None:
        """Idempotent. Running requests end with an error event."""
