"""How busy the engine is: asked once for all who want to know, and as header of answers for balancers (ORCA).

https://github.com/cncf/xds/blob/main/xds/data/orca/v3/orca_load_report.proto; the names are those of vLLM.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lmkit.api import LmkitError

if TYPE_CHECKING:
    from lmkit.api import SchedStats
    from lmkit.engine.client import EngineClient
    from lmkit.engine.messages import EngineStats

ASKED = "endpoint-load-metrics-format"  # of a request
HEADER = "endpoint-load-metrics"  # of its answer
STATS_WAIT = 1.0  # seconds; a step may be long, a probe must not be
_FRESH = 0.5  # seconds for which an answer of the engine is good enough for a header
SOON = 0.05  # seconds that an answer waits for figures


async def engine_stats(client: EngineClient, seconds: float = STATS_WAIT) -> EngineStats | None:
    """None: it did not say in time."""
    try:
        return await asyncio.wait_for(client.stats(), seconds)
    except (LmkitError, TimeoutError):
        return None


class Load:
    """The latest figures of the engine, for headers."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._stats: EngineStats | None = None
        self._at = -_FRESH

    async def headers(self, request: Mapping[str, str]) -> dict[str, str]:
        """Those that a balancer in front asks for; nothing where none does, or where the engine has said nothing."""
        wanted = request.get(ASKED, "").strip().lower()
        if wanted not in ("text", "json"):
            return {}
        if time.monotonic() - self._at > _FRESH:
            self._stats = await engine_stats(self._client, SOON) or self._stats
            self._at = time.monotonic()
        if self._stats is None:
            return {}
        figures = {name: float(value) for name, value in load(self._stats.sched).items()}
        if wanted == "json":
            return {HEADER: f"JSON {json.dumps({'named_metrics': figures})}"}
        return {HEADER: "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in figures.items())}


def load(stats: SchedStats) -> dict[str, float]:
    usage = 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0
    return {
        "kv_cache_usage_perc": round(usage, 6),
        "num_requests_waiting": stats.num_waiting,
        "num_requests_running": stats.num_running,
    }
