"""Telling plugins what happens to an engine and its requests. Costs nothing per request unless somebody listens."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from lmkit.api import EngineRequest, ResolvedPlan, TokenEvent
from lmkit.hookspecs import EngineInfo, RequestStats

if TYPE_CHECKING:
    from lmkit.engine.messages import EngineFacts
    from lmkit.plugins.host import PluginHost


class Observers:
    """The observer hooks of one engine. Exceptions of plugins are logged, never raised."""

    def __init__(self, host: PluginHost, plan: ResolvedPlan, facts: EngineFacts) -> None:
        self._host = host
        self._info = EngineInfo(facts.model, plan, facts.num_kv_tokens, facts.max_length)
        self._watching = host.implements("lmkit_request_finished")

    def started(self) -> None:
        self._host.notify("lmkit_engine_started", info=self._info)

    def stopping(self) -> None:
        self._host.notify("lmkit_engine_stopping", info=self._info)

    def watch(self, request: EngineRequest) -> Watch | None:
        """What sees all events of a request; None when no plugin wants to know."""
        return Watch(self._host, request) if self._watching else None


class Watch:
    """Counts the tokens and times of one request, and reports them once, at its finishing event."""

    __slots__ = ("_cached", "_first", "_host", "_num_output", "_request", "_start")

    def __init__(self, host: PluginHost, request: EngineRequest) -> None:
        self._host, self._request = host, request
        self._start = monotonic()
        self._first: float | None = None
        self._num_output = self._cached = 0

    def see(self, event: TokenEvent) -> None:
        self._num_output += len(event.tokens)
        self._cached = self._cached if event.num_cached is None else event.num_cached
        if self._first is None and event.tokens:
            self._first = monotonic() - self._start
        if event.finish is not None:
            stats = RequestStats(
                self._request.id, event.finish, len(self._request.token_ids), self._cached, self._num_output,
                self._first, monotonic() - self._start,
            )  # fmt: skip
            self._host.notify("lmkit_request_finished", stats=stats)
