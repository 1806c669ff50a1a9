"""A server as a process: signals, drain, exit codes, endless headers."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
PROGRAM = """
import asyncio, sys
from lmkit_http.run import bind, run_app
from lmkit_http.settings import ServerSettings
from lmkit_testing.serving import scripted

settings = ServerSettings(port=0, drain_timeout=float(sys.argv[1]), max_headers=4096)
llm = scripted("x" * 200, delay=0.005)
asyncio.run(run_app(llm, settings, bind(settings), lambda _, url: print(url, flush=True)))
print("done", flush=True)
"""


@asynccontextmanager
async def server(drain: float) -> AsyncIterator[tuple[asyncio.subprocess.Process, httpx.AsyncClient]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, str(drain), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        url = (await asyncio.wait_for(process.stdout.readline(), 30)).decode().strip()
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            yield process, client
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_sigterm_drains() -> None:
    async with server(10) as (process, client), client.stream("POST", "/v1/chat/completions", json=HELLO) as response:
        lines = response.aiter_lines()
        await anext(lines)
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        assert (await client.get("/ready")).status_code == 503
        assert (await client.post("/v1/chat/completions", json=HELLO)).status_code == 503
        rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"stop"' in rest[-2]
        assert await asyncio.wait_for(process.wait(), 10) == 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("signals", [1, 2])
async def test_drain_timeout_and_second_signal(signals: int) -> None:
    """After the time is up: a typed error in the stream. A second signal does not wait."""
    async with server(0.2 if signals == 1 else 30) as (process, client):
        async with client.stream("POST", "/v1/chat/completions", json=HELLO) as response:
            lines = response.aiter_lines()
            await anext(lines)
            process.send_signal(signal.SIGTERM)
            if signals == 2:
                await asyncio.sleep(0.1)
                process.send_signal(signal.SIGTERM)
                with pytest.raises(httpx.HTTPError):
                    [line async for line in lines]
            else:
                rest = [line async for line in lines if line]
                assert '"code":"engine-busy"' in rest[-2]
                assert rest[-1] == "data: [DONE]"
        assert await asyncio.wait_for(process.wait(), 10) == 0


async def test_endless_headers_are_cut_off() -> None:
    async with server(1) as (_, client):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write(b"GET /live HTTP/1.1\r\nX-Long: ")
        sent = 0
        with pytest.raises((ConnectionError, TimeoutError)):  # noqa: PT012 - where it breaks is up to the kernel
            while sent < 64 << 20:
                writer.write(b"y" * 65536)
                await asyncio.wait_for(writer.drain(), 5)
                sent += 65536
        assert sent < 8 << 20
        writer.close()
        assert (await client.get("/live")).status_code == 200
        assert reader is not None
