"""Prometheus metrics in a registry of their own. The names are a contract, see docs; a test lists them.

Counters and gauges of the engine are read when /metrics is asked; nothing is sampled in the background.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from lmkit.api import TokenEvent
from lmkit.text.stream import Finish, OutputEvent
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from lmkit_http.aliases import Aliases
from lmkit_http.strict import MAX_NAMED, shown_names

if TYPE_CHECKING:
    from lmkit.engine.messages import EngineStats
    from lmkit_python.front.prepare import Turn

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5)


class _EngineCollector:
    """Turns the latest EngineStats into metrics."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.stats: EngineStats | None = None
        self.up = False

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("lmkit_engine_up", "1 while the engine takes requests", labels=["model_name"])
        up.add_metric([self.model], float(self.up))
        yield up
        if self.stats is None:
            return
        s = self.stats.sched
        usage = 1 - s.num_free_blocks / s.num_blocks if s.num_blocks else 0.0
        gauges = {
            "lmkit_requests_waiting": ("requests in the queue", s.num_waiting),
            "lmkit_requests_running": ("requests being computed", s.num_running),
            "lmkit_kv_usage_ratio": ("share of KV blocks that requests hold", usage),
            "lmkit_kv_blocks": ("usable KV blocks", s.num_blocks),
        }
        counters = {
            "lmkit_steps": ("engine steps", s.num_steps),
            "lmkit_preemptions": ("requests put back to the queue", s.num_preempted),
            "lmkit_engine_prompt_tokens": ("prompt tokens admitted", s.num_prompt_tokens),
            "lmkit_engine_output_tokens": ("tokens generated", s.num_output_tokens),
            "lmkit_prefix_cache_queries": ("prompt tokens looked up in the prefix cache", s.num_cache_queries),
            "lmkit_prefix_cache_hits": ("prompt tokens found in the prefix cache", s.num_cached_tokens),
            "lmkit_kernels_compiled": ("kernels that steps waited for", self.stats.num_compiled),
            "lmkit_draft_tokens": ("tokens guessed by a proposer or forced by a grammar, and verified", s.num_drafts),
            "lmkit_accepted_draft_tokens": ("of these, tokens that were drawn", s.num_accepted),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self.model], float(value))
            yield counter
        for name, (text, level) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self.model], float(level))
            yield gauge


class _Summed:
    """A collector: what this process has counted, and what others have written into a folder, dead ones too."""

    def __init__(self, own: CollectorRegistry, folder: Path) -> None:
        self._own, self._folder = own, str(folder)
        self._found: list[Metric] = []

    def collect(self) -> Iterable[Metric]:
        return self._found

    def look(self) -> None:
        """Reads the files, for `collect`: apart, since that takes a while, and a thread can do it."""
        found: dict[str, tuple[Metric, dict[tuple[str, tuple[tuple[str, str], ...]], float]]] = {}
        for metric in chain(self._own.collect(), MultiProcessCollector(None, self._folder).collect()):
            _, sums = found.setdefault(metric.name, (Metric(metric.name, metric.documentation, metric.type), {}))
            for sample in metric.samples:
                if not sample.name.endswith("_created"):
                    key = sample.name, tuple(sample.labels.items())
                    sums[key] = sums.get(key, 0.0) + sample.value
        for metric, sums in found.values():
            for (name, labels), value in sums.items():
                metric.add_sample(name, dict(labels), value)
        self._found = [metric for metric, _ in found.values()]


class Metrics:
    """The metrics of one server. Called from the event loop only."""

    def __init__(self, model: str, folder: Path | None = None) -> None:
        """`folder`: where other processes of the server write theirs, which are added to these."""
        self._own = self.registry = CollectorRegistry()
        self._summed = None
        if folder is not None:
            self.registry, self._summed = CollectorRegistry(), _Summed(self._own, folder)
            self.registry.register(self._summed)
        self._engine = _EngineCollector(model)
        self.registry.register(self._engine)
        self.others = CollectorRegistry()  # what is said beside our own names
        self.others.register(Aliases(self.registry))

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            made = Histogram(name, text, ["model_name"], registry=self._own, buckets=tuple(buckets))
            return made.labels(model)

        self._ttft = histogram("lmkit_time_to_first_token_seconds", "from submission to the first token", _SECONDS)
        self._itl = histogram("lmkit_inter_token_latency_seconds", "between tokens of a request", _STEP_SECONDS)
        self._e2e = histogram("lmkit_request_seconds", "from submission to the last token", _SECONDS)
        self._queue = histogram("lmkit_request_queue_seconds", "in the queue before the first step", _SECONDS)
        self._prefill = histogram("lmkit_request_prefill_seconds", "from there to the first token", _SECONDS)
        self._decode = histogram("lmkit_request_decode_seconds", "from the first to the last token", _SECONDS)
        self._finished = Counter(
            "lmkit_requests_finished", "finished choices", ["model_name", "reason"], registry=self._own
        )
        self._tokens = Counter("lmkit_output_tokens", "tokens received", ["model_name"], registry=self._own).labels(
            model
        )
        self._prompt = Counter(
            "lmkit_prompt_tokens", "prompt tokens of finished choices", ["model_name"], registry=self._own
        ).labels(model)
        self._dropped = Counter(
            "lmkit_dropped_fields", "fields of requests that were dropped", ["route", "field"], registry=self._own
        )
        self._named: set[str] = set()  # fields that have a label of their own: names can be a client's
        self._http = Counter("lmkit_http_requests", "HTTP answers", ["route", "status"], registry=self._own)
        self._answers: dict[tuple[str, int], Counter] = {}  # of `_http`, which takes its time to find them
        self._model = model

    def token(self, turn: Turn, event: TokenEvent, events: Sequence[OutputEvent]) -> None:
        """News of a turn."""
        now = time.monotonic()
        num = len(event.tokens)
        if num:
            self._tokens.inc(num)
            if turn.last:
                self._itl.observe((now - turn.last) / num)
            else:
                self._ttft.observe(now - turn.submitted)
                turn.first = now
            turn.last = now
        if events and isinstance(last := events[-1], Finish):
            self._e2e.observe(now - turn.submitted)
            self._finished.labels(self._model, last.reason).inc()
            self._prompt.inc(last.usage.prompt_tokens)
            if (started := last.usage.started) is not None:
                self._queue.observe(started.queued)
                self._prefill.observe(started.prefill)
                self._decode.observe(turn.last - turn.first)

    def aborted(self) -> None:
        self._finished.labels(self._model, "abort").inc()

    def http(self, route: str, status: int) -> None:
        if (answers := self._answers.get((route, status))) is None:
            answers = self._answers[route, status] = self._http.labels(route, str(status))
        answers.inc()

    def dropped(self, route: str, fields: Collection[str]) -> None:
        """Counts the dropped fields of one request. Behind MAX_NAMED different ones all others are "other"."""
        for field in shown_names(fields):
            if len(self._named) < MAX_NAMED:
                self._named.add(field)
            self._dropped.labels(route, field if field in self._named else "other").inc()

    async def gather(self) -> None:
        """What others have written, for `render`."""
        if self._summed is not None:
            await asyncio.to_thread(self._summed.look)

    def render(self, stats: EngineStats | None, up: bool) -> bytes:
        self._engine.stats, self._engine.up = stats, up
        return generate_latest(self.registry) + generate_latest(self.others)
