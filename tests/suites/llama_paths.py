"""A pytest plugin for the suite of llama.cpp: routes that llama-server has with and without /v1 are asked with it."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
import requests

ROUTES = ("/chat/completions", "/completions", "/embeddings", "/models", "/rerank")


def with_version(url: str) -> str:
    """`url` as lmkit has it."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"/v1{parts.path}")) if parts.path in ROUTES else url


@pytest.fixture(autouse=True)
def _versioned_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    send = requests.Session.request

    def request(self: requests.Session, method: str, url: str, *args: Any, **options: Any) -> requests.Response:
        return send(self, method, with_version(url), *args, **options)

    monkeypatch.setattr(requests.Session, "request", request)
