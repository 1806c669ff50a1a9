"""Traces of requests for OpenTelemetry, by its GenAI conventions: only with `--traces`, and `lmkit-http[traces]`.

https://opentelemetry.io/docs/specs/semconv/gen-ai. The spans of a request are made when it has ended, without texts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lmkit
from lmkit.api import ConfigError
from lmkit_python.front.ask import ChatAsk, TextAsk

from lmkit_http.history import Entry, Life

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanProcessor

    from lmkit_http.backend import Backend

_OPERATIONS: dict[type, str] = {ChatAsk: "chat", TextAsk: "text_completion"}
MAX_QUEUE = 4096  # spans that wait for the collector; more are dropped, which the library logs


class Traces:
    """Makes the spans of requests that end, and gives them to `processor`. Called from the event loop."""

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "lmkit", "service.version": lmkit.__version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("lmkit", lmkit.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def ended(self, entry: Entry) -> None:
        """A span for the request, and for each choice one for each part of its life."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        shift = time.time() - time.monotonic()
        operation = _OPERATIONS.get(entry.asked, "embeddings")
        span = self._tracer.start_span(
            f"{operation} {entry.model}", self._propagator.extract(entry.trace), SpanKind.SERVER,
            _attributes(entry, operation), start_time=_ns(entry.at),
        )  # fmt: skip
        inside = set_span_in_context(span)
        for life in entry.lives:
            self._parts(life, inside, shift)
        if error := next((life.error for life in entry.lives if life.error), None):
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(_ns(max((life.ended + shift for life in entry.lives), default=entry.at)))

    def _parts(self, life: Life, inside: Context, shift: float) -> None:
        if not life.submitted:
            return
        counts, started = life.usage, life.usage.started
        parts: list[tuple[str, float, float, dict[str, Any]]] = [("queue", life.submitted, life.queued, {})]
        if started is not None:
            prompt = {"lmkit.prefill_steps": started.num_chunks, "lmkit.cached_tokens": counts.cached_tokens}
            tokens = {
                "lmkit.output_tokens": counts.completion_tokens, "lmkit.preemptions": started.num_preempted,
                "lmkit.draft_tokens": counts.draft_tokens, "lmkit.accepted_draft_tokens": counts.accepted_tokens,
            }  # fmt: skip
            parts += [("prefill", life.began, life.prefill, prompt), ("decode", life.first, life.decode, tokens)]
        for name, at, seconds, said in parts:
            about = {"lmkit.choice": life.index, **said}
            part = self._tracer.start_span(name, inside, attributes=about, start_time=_ns(at + shift))
            part.end(_ns(at + shift + seconds))

    def close(self) -> None:
        """Sends what is waiting; takes as long as the collector does, up to the exporter's own limit."""
        self._provider.shutdown()


def _attributes(entry: Entry, operation: str) -> dict[str, Any]:
    """A prompt of several choices counts once."""
    prompts = {life.prompt.tobytes(): life.usage for life in reversed(entry.lives)}
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "lmkit",
        "gen_ai.request.model": entry.model,
        "gen_ai.response.model": entry.model,
        "gen_ai.response.id": entry.id,
        "gen_ai.response.finish_reasons": [life.finish for life in entry.lives],
        "gen_ai.usage.input_tokens": sum(usage.prompt_tokens for usage in prompts.values()),
        "gen_ai.usage.cache_read.input_tokens": sum(usage.cached_tokens for usage in prompts.values()),
        "gen_ai.usage.output_tokens": sum(life.usage.completion_tokens for life in entry.lives),
        "gen_ai.usage.reasoning.output_tokens": sum(life.usage.reasoning_tokens for life in entry.lives),
        "http.route": entry.route,
        "lmkit.request_id": entry.request_id,
    }


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def check_traces(address: str) -> None:
    """Raises ConfigError where traces are wanted, and cannot be sent."""
    if not address:
        return
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"{address!r} is no collector of traces", fix="write http://HOST:4318/v1/traces")
    try:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as _  # noqa: F401
    except ImportError as e:
        raise ConfigError(f"traces cannot be sent: {e}", fix="pip install 'lmkit-http[traces]'") from e


@contextmanager
def sent(backend: Backend) -> Iterator[None]:
    """Spans go to the collector of the settings meanwhile; nothing is done where there is none."""
    if not (address := backend.settings.traces):
        yield
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    traces = Traces(BatchSpanProcessor(OTLPSpanExporter(address), max_queue_size=MAX_QUEUE))
    backend.history.on_end = traces.ended
    try:
        yield
    finally:
        backend.history.on_end = None
        traces.close()
