"""An ASGI application, called without a socket: a request goes in whole, the answer comes out as it is made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message


@dataclass(frozen=True, slots=True)
class Asked:
    """A request. `path` is as it was sent, without the query."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    client: tuple[str, int] | None
    body: bytes

    def scope(self) -> dict[str, Any]:
        return {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "scheme": "http", "method": self.method, "path": self.path, "raw_path": self.path.encode(),
            "query_string": self.query, "root_path": "", "headers": self.headers, "client": self.client,
            "server": None, "state": {},
        }  # fmt: skip


Head = tuple[int, list[tuple[bytes, bytes]]]


async def call(app: ASGIApp, asked: Asked) -> AsyncIterator[Head | bytes]:
    """The head of the answer, then its parts. Who leaves the iteration has hung up. Raises what the application does
    before its head."""
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    left, received = asyncio.Event(), [{"type": "http.request", "body": asked.body, "more_body": False}]

    async def receive() -> Message:
        if received:
            return received.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(asked.scope(), receive, sent.put)
        finally:
            await sent.put(None)

    task = asyncio.create_task(run())
    try:
        while (message := await sent.get()) is not None:
            if message["type"] == "http.response.start":
                yield message["status"], list(message["headers"])
            elif message["type"] == "http.response.body" and message.get("body"):
                yield bytes(message["body"])
        await task
    finally:
        left.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
