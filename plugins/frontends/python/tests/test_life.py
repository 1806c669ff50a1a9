"""What was changed in an engine is changed in the one that takes its place."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from lmkit.api import CheckpointError, ConfigError, EngineRequest, SamplingParams
from lmkit_python.life import EngineLife
from lmkit_testing.hash_model import HashModel, expected_tokens
from lmkit_testing.serving import END, supervised

PARAMS = SamplingParams(max_tokens=6, temperature=0.0)


def expected(weights: bytes) -> list[int]:
    model = replace(HashModel(vocab_size=END + 1), weights=crc32(weights) if weights else 0)
    return expected_tokens(model, [1, 2, 3], PARAMS)


async def say(client: Any, id: str) -> list[int]:
    events = [event async for event in client.submit(EngineRequest(id, [1, 2, 3], PARAMS))]
    assert events[-1].finish == "length", events[-1].error
    return [token for event in events for token in event.tokens]


async def replaced(client: Any) -> None:
    """Kills the engine; returns when there is another."""
    old = client.client
    os.kill(old.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        while client.client is old or client.state != "ready":
            await asyncio.sleep(0.01)


async def test_a_successor_has_the_weights_in_force(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    async with supervised() as llm:
        life = EngineLife(llm.client)
        path.write_bytes(b"one")
        await life.update_weights(path)
        path.write_bytes(b"two")
        await life.update_weights(path)
        await replaced(llm.client)
        assert await life.state() == "running"
        assert await say(llm.client, "a") == expected(b"two")
        await life.sleep(2)
        await replaced(llm.client)
        assert await life.state() == "asleep"
        waiting = asyncio.create_task(say(llm.client, "b"))
        await life.wake_up()
        assert await waiting == expected(b"two")
        await replaced(llm.client)
        assert await life.state() == "running", "what was taken back is not done again"


async def test_without_them_it_is_not_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rather none than one that says something else."""
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    async with supervised() as llm:
        client: Any = llm.client
        client._restarts = 2
        await EngineLife(client).update_weights(path)
        path.write_bytes(b"two")
        os.kill(client.client.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while not client.ended:
                await asyncio.sleep(0.01)
        assert "has changed" in client.failure.message
        events = [event async for event in client.submit(EngineRequest("a", [1], PARAMS))]
        assert events[-1].finish == "error"


async def test_parts_are_not_collected_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkit_python.supervised.MAX_UPDATES", 3)
    async with supervised() as llm:
        life = EngineLife(llm.client)
        for i in range(4):
            path = tmp_path / str(i)
            path.write_bytes(b"%d" % i)
            if i == 3:
                with pytest.raises(ConfigError, match="all weights at once"):
                    await life.update_weights(path, partial=True)
                await life.update_weights(path)
            await life.update_weights(path, partial=True)
        with pytest.raises(CheckpointError, match="cannot be read"):
            await life.update_weights(tmp_path / "none")
        assert await life.state() == "running"
