"""A server whose engine is dead for good tells its clients for a while, then ends with an exit status."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from lmkit.api import EngineDead
from lmkit_http import run
from lmkit_http.settings import ServerSettings
from lmkit_testing.serving import scripted


async def test_a_server_without_an_engine_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run, "_LAST_WORDS", 2.0)
    settings = ServerSettings(port=0)
    llm, urls = scripted("x"), asyncio.Queue[str]()
    with run.bind(settings) as sock:
        serving = asyncio.create_task(run.run_app(llm, settings, sock, lambda _, url: urls.put_nowait(url)))
        url = await asyncio.wait_for(urls.get(), 10)
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/ready")).status_code == 200
            llm.client.kill()
            for _ in range(10):
                assert (await client.get("/ready")).status_code == 503
        with pytest.raises(EngineDead):
            await asyncio.wait_for(serving, 15)
    assert len(caplog.records) < 5, "probes of a dead engine are no news"
