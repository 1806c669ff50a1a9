"""Schemathesis over every route of the server: no 5xx that is not typed, no hang. API_FUZZ_SECONDS says how long.

The document is made of the routes that the server has and of the classes that read their bodies.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from lmkit_dialect_openai.dialect import REQUESTS
from lmkit_http.app import build_app
from lmkit_http.info_schema import DetokenizeRequest, TokenizeRequest
from lmkit_testing.serving import listening, scripted

schemathesis = pytest.importorskip("schemathesis", reason="nox -s api_fuzz installs it")
hypothesis = importlib.import_module("hypothesis")

SECONDS = float(os.environ.get("API_FUZZ_SECONDS", "5"))
PATIENCE = 30.0  # seconds that an answer may take on a busy machine; a hang takes them all
TYPED = {503: "engine-busy", 504: "deadline"}  # states of the server, not faults
MODELS = {**REQUESTS, "POST /tokenize": TokenizeRequest, "POST /detokenize": DetokenizeRequest}


def document(app: Any) -> dict[str, Any]:
    """OpenAPI 3.1 of the application's routes."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for route in app.routes:
        for method in sorted(route.methods - {"HEAD", "OPTIONS"}):
            path = route.path.replace(":path}", "}")
            operation: dict[str, Any] = {"responses": {"default": {"description": "any"}}}
            names = [part.partition("}")[0] for part in path.split("{")[1:]]
            text = {"type": "string", "minLength": 1}
            operation["parameters"] = [{"name": n, "in": "path", "required": True, "schema": text} for n in names]
            if method in ("POST", "PUT", "PATCH"):
                schema: dict[str, Any] = {"type": "object"}
                if (model := MODELS.get(f"{method} {path}")) is not None:
                    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
                    schemas |= schema.pop("$defs", {})
                operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
            paths.setdefault(path, {})[method.lower()] = operation
    info = {"title": "lmkit", "version": "1"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server in a thread of its own."""
    ready, address = threading.Event(), []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with listening(scripted("abc")) as found:
            address.append(found)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(60)
    yield address[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)
    loop.close()


def check(case: Any, url: str) -> None:
    response = case.call(base_url=url, timeout=PATIENCE)
    status = response.status_code
    if status >= 500:
        assert status in TYPED, f"{case.method} {case.path}: {status} {response.text[:500]}"
        assert TYPED[status] in response.text


def fuzz(operation: Any, mode: Any, url: str, seconds: float) -> int:
    """How many requests of one kind were sent to one operation."""
    end, num = time.monotonic() + seconds, 0

    def run(case: Any) -> None:
        nonlocal num
        if num == 0 or time.monotonic() < end:
            num += 1
            check(case, url)

    settings = hypothesis.settings(
        max_examples=max(1, int(seconds * 200)), deadline=None, database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    with suppress(hypothesis.errors.Unsatisfiable):  # no wrong request can be made for a route without input
        settings(hypothesis.given(case=operation.as_strategy(generation_mode=mode))(run))()
    return num


def test_no_route_breaks_or_hangs(url: str) -> None:
    """In turn, each for its share of the time: valid requests, and wrong ones."""
    schema = schemathesis.openapi.from_dict(document(build_app(scripted("abc"))))
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 30
    modes = list(schemathesis.GenerationMode)
    share, num = SECONDS / len(operations) / len(modes), 0
    for operation in operations:
        for mode in modes:
            num += fuzz(operation, mode, url, share)
    print(f"{num} requests to {len(operations)} operations")
    assert num > len(operations) / 2
