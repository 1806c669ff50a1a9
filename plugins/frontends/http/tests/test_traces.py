"""Spans of real requests: in memory, and as a collector on a real socket gets them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from lmkit.api import ConfigError
from lmkit_http.app import build_app
from lmkit_http.settings import ServerSettings
from lmkit_http.traces import Traces, check_traces, sent
from lmkit_testing.serving import ServedLLM, hashed, scripted

pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the exporter of OpenTelemetry is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

BODY = {"prompt": "secret12", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def opened(llm: ServedLLM, **settings: Any) -> tuple[httpx.AsyncClient, Any]:
    app = build_app(llm, ServerSettings(**settings))
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
    return client, app.state.backend


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_a_span_with_its_parts_inside(stream: bool) -> None:
    spans = InMemorySpanExporter()
    async with hashed(block_size=4) as llm:
        client, backend = opened(llm)
        backend.history.on_end = Traces(SimpleSpanProcessor(spans)).ended
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        answer = await client.post("/v1/completions", json=BODY | {"n": 2, "stream": stream}, headers=headers)
        assert answer.status_code == 200
        await client.aclose()
    *parts, whole = spans.get_finished_spans()
    assert whole.attributes is not None
    assert whole.name.startswith("text_completion ")
    assert (f"{whole.context.trace_id:032x}", f"{whole.parent.span_id:016x}") == (TRACE, PARENT)
    said = {name: whole.attributes[f"gen_ai.{name}"] for name in ("operation.name", "usage.input_tokens",
            "usage.output_tokens", "response.finish_reasons")}  # fmt: skip
    assert said == {"operation.name": "text_completion", "usage.input_tokens": 8, "usage.output_tokens": 10,
                    "response.finish_reasons": ("length", "length")}  # fmt: skip
    assert whole.attributes["lmkit.request_id"] == answer.headers["x-request-id"]
    assert sorted(s.name for s in parts) == ["decode", "decode", "prefill", "prefill", "queue", "queue"]
    for choice in (0, 1):
        queue, prefill, decode = (
            next(s for s in parts if s.name == name and s.attributes["lmkit.choice"] == choice)
            for name in ("queue", "prefill", "decode")
        )
        assert queue.start_time <= queue.end_time <= prefill.end_time
        assert prefill.start_time <= prefill.end_time
        assert decode.start_time <= decode.end_time
        assert decode.attributes["lmkit.output_tokens"] == 5
    assert all(s.parent.span_id == whole.context.span_id for s in parts)
    assert not any("secret" in s.to_json() for s in (whole, *parts))


async def test_what_a_trace_is_part_of_may_be_nonsense() -> None:
    spans = InMemorySpanExporter()
    client, backend = opened(scripted("abc"))
    backend.history.on_end = Traces(SimpleSpanProcessor(spans)).ended
    for parent in ("", "nonsense", f"00-{'0' * 32}-{PARENT}-01"):
        assert (await client.post("/v1/completions", json=BODY, headers={"traceparent": parent})).status_code == 200
    await client.aclose()
    whole = [s for s in spans.get_finished_spans() if s.name.startswith("text")]
    assert [s.parent for s in whole] == [None] * 3
    assert all(s.status.status_code is StatusCode.UNSET for s in whole)


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Its address, and the spans that it got."""
    found: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                data = gzip.decompress(data)
            asked = ExportTraceServiceRequest.FromString(data)
            found.extend(s for r in asked.resource_spans for scope in r.scope_spans for s in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Says nothing."""

    made = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}/v1/traces", found
    made.shutdown()
    made.server_close()


async def test_a_collector_gets_them_before_the_server_ends(collector: tuple[str, list[Any]]) -> None:
    address, found = collector
    client, backend = opened(scripted("abc"), traces=address)
    with sent(backend):
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
    await client.aclose()
    assert [s.name for s in found if s.name.startswith("text")] == ["text_completion scripted"]
    assert backend.history.on_end is None


def test_addresses_are_checked_before_anything_starts() -> None:
    check_traces("")
    check_traces("http://localhost:4318/v1/traces")
    with pytest.raises(ConfigError, match="no collector"):
        check_traces("localhost:4318")
