"""Steps that are recorded on request: who may ask, what is written, and when it ends."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import httpx
from lmkit_http.settings import ServerSettings
from lmkit_testing.serving import listening, real, scripted

ASK = {"prompt": "a", "max_tokens": 8, "ignore_eos": True, "temperature": 0}


async def written(folder: Path) -> dict[str, Any]:
    """The one recording, when it is whole; then it is gone."""
    async with asyncio.timeout(60):
        while not (found := [path for path in folder.iterdir() if ".part" not in path.name]):
            await asyncio.sleep(0.02)
    (path,) = found
    trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    path.unlink()
    return trace


async def test_steps_are_recorded(tmp_path: Path) -> None:
    settings = ServerSettings(port=0, profile_dir=str(tmp_path), admin_keys=("boss",), api_keys=("client",))
    boss = {"authorization": "Bearer boss"}
    async with real("demo") as llm, listening(llm, settings) as url, httpx.AsyncClient(base_url=url, timeout=60) as c:
        c.headers["authorization"] = "Bearer client"
        plain = (await c.post("/v1/completions", json=ASK)).json()["choices"]
        for path in ("/start_profile", "/stop_profile"):
            assert (await c.post(path)).json()["error"]["code"] == "admin-key"
        answer = await c.post("/start_profile", headers=boss, json={"profile_prefix": "mine"})
        assert (answer.status_code, answer.json()["max_iterations"]) == (200, 100)
        again = await c.post("/start_profile", headers=boss)
        assert (again.status_code, again.json()["error"]["message"]) == (400, "steps are being recorded already")
        assert (await c.post("/v1/completions", json=ASK)).json()["choices"] == plain
        assert (await c.post("/stop_profile", headers=boss)).status_code == 200
        whole = await written(tmp_path)
        assert len(whole["traceEvents"]) > 50
        again = await c.post("/stop_profile", headers=boss)
        assert (again.status_code, again.json()["error"]["message"]) == (400, "no steps are being recorded")
        # it ends by itself
        await c.post("/start_profile", headers=boss, json={"max_iterations": 2})
        await c.post("/v1/completions", json=ASK)
        short = await written(tmp_path)
        assert len(short["traceEvents"]) < len(whole["traceEvents"]) / 2
        for body in ({"max_iterations": 0}, {"max_iterations": 1001}, {"profile_prefix": "../x"}, {"delay": 1}):
            assert (await c.post("/start_profile", headers=boss, json=body)).status_code == 400
        # one that goes on at the end is written
        await c.post("/start_profile", headers=boss)
        await c.post("/v1/completions", json=ASK)
    assert await written(tmp_path)


async def test_it_is_off_unless_there_is_a_place_for_it() -> None:
    async with listening(scripted("x")) as url, httpx.AsyncClient(base_url=url) as c:
        for path in ("/start_profile", "/stop_profile"):
            answer = await c.post(path)
            assert answer.status_code == 404
            assert "--profile-dir" in answer.json()["error"]["message"]
