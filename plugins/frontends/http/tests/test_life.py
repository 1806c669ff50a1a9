"""Routes that change the engine: who may, what they do to answers on their way, and what is refused."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import httpx
import pytest
from lmkit.api import SamplingParams
from lmkit_http.settings import ServerSettings
from lmkit_testing.hash_model import HashModel, expected_tokens
from lmkit_testing.serving import END, hashed, listening, scripted

ROOT, ALICE = ({"Authorization": f"Bearer {key}"} for key in ("root", "alice"))
KEYS = ServerSettings(port=0, api_keys=("alice",), admin_keys=("root",))
CHANGES = ["/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", "/update_weights"]
PROMPT = [1, 2, 3]


def expected(num: int, weights: bytes = b"") -> list[int]:
    model = replace(HashModel(vocab_size=END + 1), weights=crc32(weights) if weights else 0)
    return expected_tokens(model, PROMPT, SamplingParams(max_tokens=num, temperature=0.0))


class Server:
    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def post(self, path: str, status: int = 200, **more: Any) -> Any:
        response = await self.client.post(path, **more)
        assert response.status_code == status, response.text
        return response.json()

    async def get(self, path: str, status: int = 200) -> Any:
        response = await self.client.get(path)
        assert response.status_code == status, response.text
        return response.json()

    async def complete(self, num: int) -> tuple[list[int], str]:
        body = {"prompt": PROMPT, "max_tokens": num, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
        choice = (await self.post("/v1/completions", json=body, timeout=60))["choices"][0]
        return choice["token_ids"], choice["finish_reason"]


@asynccontextmanager
async def serving(settings: ServerSettings = KEYS, **options: object) -> AsyncIterator[Server]:
    async with (
        hashed(**options) as llm,
        listening(llm, settings) as url,
        httpx.AsyncClient(base_url=url, headers=ROOT) as client,
    ):
        yield Server(client)


@pytest.mark.parametrize(
    ("settings", "headers", "status"),
    [(KEYS, ALICE, 403), (KEYS, {}, 401), (ServerSettings(), {}, 403), (ServerSettings(admin_keys=("root",)), {}, 403)],
)
async def test_only_administrators_change_the_engine(connect: Any, settings: Any, headers: Any, status: int) -> None:
    """And nobody, where there are none: weights are read from whatever file the request names."""
    client = connect(scripted("a"), settings, headers=headers)
    for path in CHANGES:
        response = await client.post(path, json={"path": "/etc/passwd"})
        assert response.status_code == status
        if status == 403:
            assert "--admin-key" in response.text


async def test_weights_that_nobody_writes_are_refused_at_once(tmp_path: Path) -> None:
    """A pipe would be waited for, by the thread that steps the engine."""
    os.mkfifo(tmp_path / "w.safetensors")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "model.safetensors")
    async with serving() as server:
        for path in (tmp_path / "w.safetensors", tmp_path / "folder", Path("/dev/zero")):
            for partial in (False, True):
                body = {"path": str(path), "partial": partial}
                error = (await server.post("/update_weights", 400, json=body))["error"]
                assert "not a regular file" in error["message"]
        assert await server.get("/is_paused") == {"is_paused": False}


async def test_what_is_asked_wrongly_is_refused() -> None:
    async with serving() as server:
        for path, param in [
            ("/sleep?level=3", "level"), ("/sleep?mode=never", "mode"), ("/pause?level=1", "level"),
            ("/wake_up?tags=weights", "tags"), ("/pause?mode=keep&mode=wait", "mode"), ("/resume?x", "x"),
            ("/reset_prefix_cache?reset_running_requests=true", "reset_running_requests"),
        ]:  # fmt: skip
            assert (await server.post(path, 400))["error"]["param"] == param
        for body in ({}, {"path": ""}, {"path": "x", "names": []}, {"path": 5}, {"path": "x", "partial": "yes"}):
            await server.post("/update_weights", 400, json=body)
        assert (
            "cannot be read"
            in (await server.post("/update_weights", 400, json={"path": "/no/file"}))["error"]["message"]
        )
        assert (await server.post("/wake_up", 409))["error"]["code"] == "engine-state"
        assert await server.get("/is_paused") == {"is_paused": False}


async def test_answers_wait_while_it_sleeps() -> None:
    async with serving() as server:
        assert await server.post("/sleep?level=2&mode=keep") == {"state": "asleep"}
        assert await server.get("/is_sleeping") == {"is_sleeping": True}
        assert "asleep" in (await server.get("/ready", 503))["error"]["message"]
        await server.get("/health")
        asked = [asyncio.create_task(server.complete(5)) for _ in range(3)]
        assert not (await asyncio.wait(asked, timeout=0.1))[0]
        assert (await server.post("/resume", 409))["error"]["code"] == "engine-state"
        assert await server.post("/wake_up") == {"state": "running"}
        assert [tokens for tokens, _ in await asyncio.gather(*asked)] == [expected(5)] * 3
        await server.get("/ready")


async def test_a_pause_ends_answers_or_lets_them_end() -> None:
    async with serving(delay=0.002) as server:
        body = {"prompt": PROMPT, "max_tokens": 3000, "temperature": 0}
        ended = asyncio.create_task(server.post("/v1/completions", 503, json=body, timeout=60))
        await until_one_runs(server)
        await server.post("/pause")
        assert (await ended)["error"]["code"] == "aborted"
        await server.post("/resume")
        asked = asyncio.create_task(server.complete(100))
        await until_one_runs(server)
        await server.post("/pause?mode=wait")
        late = asyncio.create_task(server.complete(4))
        assert (await asked)[0] == expected(100)
        assert await server.get("/is_paused") == {"is_paused": True}
        await server.post("/resume")
        assert (await late)[0] == expected(4)


async def test_an_answer_goes_on_with_new_weights(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"new")
    async with serving(delay=0.002) as server:
        asked = asyncio.create_task(server.complete(200))
        await until_one_runs(server)
        await server.post("/update_weights", json={"path": str(path)})
        tokens, finish = await asked
        assert finish == "length"
        assert len(tokens) == 200
        model = replace(HashModel(vocab_size=END + 1), weights=crc32(b"new"))
        num_old = next(i for i, (a, b) in enumerate(zip(tokens, expected(200), strict=True)) if a != b)
        left = SamplingParams(max_tokens=200 - num_old, temperature=0.0)
        assert tokens[num_old:] == expected_tokens(model, PROMPT + tokens[:num_old], left)
        assert (await server.complete(5))[0] == expected(5, b"new")
        await server.post("/pause?mode=keep")
        path.write_bytes(b"newer")
        assert await server.post("/update_weights", json={"path": str(path)}) == {"state": "paused"}
        await server.post("/resume")
        assert (await server.complete(5))[0] == expected(5, b"newer")


async def until_one_runs(server: Server) -> None:
    async with asyncio.timeout(60):
        while not (await server.get("/load")).get("num_requests_running"):
            await asyncio.sleep(0.01)
