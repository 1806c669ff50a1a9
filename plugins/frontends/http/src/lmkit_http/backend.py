"""Backend: one served model, with everything that routes share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from lmkit.api import EngineBusy, EngineDead

from lmkit_http.admission import Admission
from lmkit_http.backlog import Backlogs
from lmkit_http.body import Bodies
from lmkit_http.dialect import Served
from lmkit_http.history import Entry, History
from lmkit_http.limits import body_limit, queue_limit, values_limit
from lmkit_http.load import Load
from lmkit_http.metrics import Metrics
from lmkit_http.settings import ServerSettings
from lmkit_http.workers import Workers

if TYPE_CHECKING:
    from lmkit.engine.client import EngineClient
    from lmkit.engine.messages import EngineFacts
    from lmkit.text.side import TextSide
    from lmkit_python.front.run import Generation
    from lmkit_python.life import EngineLife

    from lmkit_http.dialect import Exchange
    from lmkit_http.handing import Part


class ServedModel(Protocol):
    """What the server needs of an AsyncLLM."""

    @property
    def client(self) -> EngineClient: ...
    @property
    def text(self) -> TextSide: ...
    @property
    def facts(self) -> EngineFacts: ...


@dataclass
class Backend:
    """One served model, with everything the routes share."""

    client: EngineClient
    text: TextSide
    facts: EngineFacts
    settings: ServerSettings
    metrics: Metrics
    life: EngineLife
    plan: Any = None  # ResolvedPlan
    adapters: set[str] = field(default_factory=set)  # names under which requests get the model with an adapter
    draining: bool = False
    running: set[Generation] = field(default_factory=set)  # being answered
    num_preparing: int = 0  # accepted, not yet running
    startup: tuple[tuple[str, float], ...] = ()  # phase, seconds; from the start of the process until ready
    bodies: Bodies = field(init=False)
    admission: Admission = field(init=False)
    backlogs: Backlogs = field(init=False)
    workers: Workers = field(default_factory=Workers)
    served: Served = field(init=False)  # what dialects know of it
    history: History = field(default_factory=History)
    load: Load = field(init=False)
    background: Any = None  # Background, which knows this class; set by build_app
    part: Part | None = None  # of a server of several processes
    spread: Callable[[], Awaitable[None]] | None = None  # tells the other processes of adapters, and waits for them
    elsewhere: Callable[[], Iterable[tuple[bool, str]]] = tuple  # requests of other processes for adapters: begun, name

    def __post_init__(self) -> None:
        counts = self.part.counts if self.part is not None else None
        self.bodies = Bodies(body_limit(self.facts, self.settings), self.settings.max_bodies, counts)
        self.backlogs = Backlogs(self.running)
        self.load = Load(self.client)
        self._max_active = queue_limit(self.facts)
        rows = max(1, (self.facts.max_rows or 1) // self.settings.api_workers)
        self.admission = Admission(self._max_active, rows, self.settings, lambda: self.num_active, counts=counts)
        self.served = Served(
            self.names, self.adapters, self.text.tokenizer, self.text.default_params or {}, self.facts.max_length,
            self.settings.max_choices, values_limit(self.facts, self.settings), self.facts.pooler, self._about(),
            getattr(self.text.renderer, "words", ()), self.settings.unknown_fields == "warn",
        )  # fmt: skip

    def _about(self) -> dict[str, Any]:
        """What clients may know of the model."""
        renderer, pooler = self.text.renderer, self.facts.pooler
        return {
            "created": self.part.created if self.part is not None else int(time.time()), "owned_by": "lmkit",
            "root": self.facts.model, "max_model_len": self.facts.max_length,
            "capabilities": {
                "tasks": list(pooler.tasks) if pooler is not None else ["generate"],
                "chat": renderer is not None,
                "tools": self.text.tool_format is not None and renderer is not None and renderer.takes_tools,
                "tool_results": renderer is not None and renderer.takes_tool_results,
                "system": renderer is not None and renderer.takes_system,
                "reasoning": self.text.reasoning_format is not None,
                "template_options": sorted(renderer.options) if renderer else [],
                "template_findings": renderer.findings if renderer else {},
            },
        }  # fmt: skip

    def begin(
        self, exchange: Exchange, generation: Generation, route: str, tenant: str, headers: Mapping[str, str]
    ) -> Entry:
        """From now on it is being answered."""
        self.running.add(generation)
        self.backlogs.watch()
        model = exchange.ask.adapter or self.model
        self.metrics.dropped(route, exchange.dropped)
        return self.history.open(exchange, generation, route, model, tenant, headers)

    def prepared(self) -> None:
        """One request less is being prepared: it is running now, or over."""
        self.num_preparing -= 1
        self.admission.total()

    def end(self, generation: Generation) -> None:
        """It is answered, or given up. Idempotent."""
        self.running.discard(generation)
        self.admission.total()
        self.history.close(generation)

    @property
    def prefix_cache(self) -> bool:
        """Whether prompts are looked up in it."""
        return bool(self.plan is None or self.plan.value("prefix_cache", True))

    @property
    def num_active(self) -> int:
        """Requests that this process answers."""
        return len(self.running) + self.num_preparing

    def abort_all(self) -> None:
        """Ends every running request with a typed error."""
        error = EngineBusy("the server is shutting down and this request was aborted", fix="send it elsewhere").info()
        for generation in list(self.running):
            generation.fail(error)

    @property
    def model(self) -> str:
        return self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model itself, the main one first."""
        return self.settings.served_names or (self.facts.model,)

    def check_model(self, name: str | None) -> None:
        """Raises UnknownModel."""
        self.served.check_model(name)

    def check_open(self) -> None:
        """Raises EngineBusy or EngineDead when no new generation can start."""
        state = self.client.state
        if state == "dead":
            raise EngineDead("the engine is not running", fix="try again in a while")
        if self.draining or state == "draining":
            raise EngineBusy("the server is shutting down", fix="send the request elsewhere")
        if state != "ready":
            raise EngineBusy("the engine is still starting", fix="try again in a few seconds")

    def check_room(self) -> None:
        """Raises what `check_open` does, and EngineBusy when as many requests as may wait do so already."""
        self.check_open()
        if (total := self.admission.total()) >= self._max_active:
            raise EngineBusy(f"{total} requests are waiting or running", fix="try again in a while")

    async def idle(self, timeout: float) -> bool:
        """Waits until no generation is being answered."""
        end = asyncio.get_running_loop().time() + timeout
        while self.num_active and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)
        return not self.num_active
