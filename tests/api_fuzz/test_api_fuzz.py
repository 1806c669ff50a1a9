"""Schemathesis over every route of the server: no 5xx that is not typed, no hang. API_FUZZ_SECONDS says how long.

The document is made of the routes that the server has and of the classes that read their bodies.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from lmkit.plugins.host import PluginHost
from lmkit_http.app import build_app
from lmkit_http.dialects import load_dialects
from lmkit_http.info_schema import DetokenizeRequest, TokenizeRequest
from lmkit_testing.serving import listening, scripted

schemathesis = pytest.importorskip("schemathesis", reason="nox -s api_fuzz installs it")
hypothesis = importlib.import_module("hypothesis")

ROOT = Path(__file__).parents[2]
SECONDS = float(os.environ.get("API_FUZZ_SECONDS", "5"))
PATIENCE = 30.0  # seconds that an answer may take on a busy machine; a hang takes them all
TYPED = {503: "engine-busy", 504: "deadline"}  # states of the server, not faults
TEXT = {"type": "string", "minLength": 1}
FORMS = {  # bodies that are multipart/form-data
    "POST /v1/files": {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": ["batch", "vision"]}},
    "POST /v1/uploads/{id}/parts": {"data": {"type": "string", "format": "binary"}},
}


def models(dialects: Sequence[Any]) -> dict[str, Any]:
    """What reads the bodies of the routes."""
    found: dict[str, Any] = {"POST /tokenize": TokenizeRequest, "POST /detokenize": DetokenizeRequest}
    for dialect in dialects:
        found |= getattr(sys.modules[type(dialect).__module__], "REQUESTS", {})
    chat, completions = (found[f"POST /v1/{name}"] for name in ("chat/completions", "completions"))
    rendered = {"POST /v1/chat/completions/render": chat, "POST /v1/completions/render": completions}
    return found | rendered | {"POST /invocations": chat}


def document(app: Any, models: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAPI 3.1 of the application's routes."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for route in app.routes:
        for method in sorted(route.methods - {"HEAD", "OPTIONS"}):
            path = route.path.replace(":path}", "}")
            operation: dict[str, Any] = {"responses": {"default": {"description": "any"}}}
            names = [part.partition("}")[0] for part in path.split("{")[1:]]
            operation["parameters"] = [{"name": n, "in": "path", "required": True, "schema": TEXT} for n in names]
            if method in ("POST", "PUT", "PATCH"):
                form = FORMS.get(f"{method} {path}")
                schema: dict[str, Any] = {"type": "object", **({"properties": form} if form is not None else {})}
                if (model := models.get(f"{method} {path}")) is not None:
                    schema = model.model_json_schema(ref_template=f"#/components/schemas/{model.__module__}.{{model}}")
                    schemas |= {f"{model.__module__}.{name}": d for name, d in schema.pop("$defs", {}).items()}
                kind = "multipart/form-data" if form is not None else "application/json"
                operation["requestBody"] = {"required": True, "content": {kind: {"schema": schema}}}
            paths.setdefault(path, {})[method.lower()] = operation
    info = {"title": "lmkit", "version": "1"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


@pytest.fixture(scope="module")
def dialects(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """All that are installed, with a place for files."""
    folder = str(tmp_path_factory.mktemp("files"))
    return load_dialects(PluginHost(), {"dialect.batches": {"dir": folder}})


@pytest.fixture(scope="module")
def url(dialects: list[Any]) -> Iterator[str]:
    """A server in a thread of its own."""
    ready, address = threading.Event(), []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with listening(scripted("abc"), dialects=dialects) as found:
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


class Enough(BaseException):
    """The time is over: nothing more is made up, which takes longer than asking."""


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
        if num and time.monotonic() >= end:
            raise Enough
        num += 1
        check(case, url)

    settings = hypothesis.settings(
        max_examples=max(1, int(seconds * 200)), deadline=None, database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    with suppress(hypothesis.errors.Unsatisfiable, Enough):  # no wrong request can be made for a route without input
        settings(hypothesis.given(case=operation.as_strategy(generation_mode=mode))(run))()
    return num


def test_all_dialects_are_there(dialects: list[Any]) -> None:
    """Each that stands in the house, with the classes that read its bodies."""
    folders = {path.name for path in (ROOT / "plugins" / "dialects").iterdir() if path.is_dir()}
    modules = {f"lmkit_dialect_{name}.dialect" for name in folders}
    assert {type(dialect).__module__ for dialect in dialects} == modules
    written = models(dialects).keys() | FORMS.keys()
    bodies = {route for dialect in dialects for route in dialect.routes if route.startswith("POST")}
    assert not bodies - written


def test_no_route_breaks_or_hangs(url: str, dialects: list[Any]) -> None:
    """In turn, each for its share of the time: valid requests, and wrong ones."""
    app = build_app(scripted("abc"), dialects=dialects)
    schema = schemathesis.openapi.from_dict(document(app, models(dialects)))
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 30
    modes = list(schemathesis.GenerationMode)
    share, sent = SECONDS / len(operations) / len(modes), Counter[str]()
    for operation in operations:
        for mode in modes:
            found = fuzz(operation, mode, url, share)
            sent[f"{operation.method.upper()} {operation.path}"] += found
    print(f"{sent.total()} requests to {len(operations)} operations")
    assert not [route for route in models(dialects) if not sent[route]], "each that reads a body was asked"
