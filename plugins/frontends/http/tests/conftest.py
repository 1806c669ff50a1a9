"""Clients of an application in memory."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from lmkit_http import run
from lmkit_http.app import build_app
from lmkit_http.settings import ServerSettings
from lmkit_testing.serving import ServedLLM

Connect = Callable[..., httpx.AsyncClient]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """connect(llm, settings) -> a client that talks to the application without a socket."""
    clients = []

    def make(llm: ServedLLM, settings: ServerSettings | None = None, **options: Any) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(build_app(llm, settings), raise_app_exceptions=False)
        clients.append(httpx.AsyncClient(transport=transport, base_url="http://localhost", **options))
        return clients[-1]

    yield make
    for client in clients:
        await client.aclose()


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets of servers hold little, so that a client who does not read is noticed soon."""
    bind = run.bind

    def small(settings: ServerSettings) -> socket.socket:
        sock = bind(settings)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        return sock

    monkeypatch.setattr(run, "bind", small)
