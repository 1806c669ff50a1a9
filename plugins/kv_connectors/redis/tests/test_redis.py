"""A real server, started here; one that is killed; one that was never there."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lmkit_kv_connector_redis.connector import RedisConnector, Server
from lmkit_kv_connector_redis.options import Options
from lmkit_testing import KVConnectorConformance
from lmkit_testing.engines import no_checkpoint, no_plan
from lmkit_testing.hash_model import hash_kv
from lmkit_testing.kv_connectors import PATIENCE, WaitingTrial, fetched, settled

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")
needs_server = pytest.mark.skipif(PROGRAM is None, reason="needs redis-server or valkey-server (apt install redis)")


def start(folder: Path) -> subprocess.Popen[bytes]:
    """A server at a Unix socket, which answers."""
    assert PROGRAM is not None
    path = folder / "s"
    command = [PROGRAM, "--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    until = time.monotonic() + PATIENCE
    server = Server(f"unix://{path}", 60, 5)
    while True:
        try:
            server.client.ping()
        except Exception:
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
        else:
            server.close()
            return process


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("r")
    process = start(folder)
    yield f"unix://{folder / 's'}"
    process.kill()
    process.wait()


@needs_server
class TestRedis(KVConnectorConformance):
    plugin = "kv_connector:redis"

    @pytest.fixture(autouse=True)
    def _server(self, server: str) -> None:
        self.url = server

    def options(self, tmp_path: Path) -> dict[str, Any]:
        return {"url": self.url}

    def test_another_engine_finds_it(self, make: Any) -> None:
        one, other = make(), make()
        blocks = self.blocks(one, 10)
        one.save(blocks)
        assert settled(other, [key for key, _ in blocks]) == dict(blocks)

    def test_a_damaged_frame_is_removed(self, make: Any) -> None:
        one = make()
        ((key, content),) = self.blocks(one, 1)[:1]
        one.store.write(key, b"damaged")
        assert fetched(one, "r", [key]) == {}
        assert one.computed(key, b"", [])
        one.save([(key, content)])
        assert settled(one, [key]) == {key: content}


def connector(url: str, **options: Any) -> RedisConnector:
    return RedisConnector(no_checkpoint(), no_plan(), hash_kv(64, 4), url=url, **options)


def test_no_server_costs_nothing_but_time() -> None:
    one = connector("redis://127.0.0.1:1/0", pause=0)
    keys = [(0, bytes([i]) * 32) for i in range(3)]
    one.save([(key, bytes(64)) for key in keys])
    assert not fetched(one, "r", keys)
    assert one.flush(PATIENCE)
    assert one.num_dropped == 3
    one.close()


@needs_server
def test_a_server_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    """Requests go on meanwhile, with the right text; blocks are found again afterwards."""
    process = start(tmp_path)
    one = connector(f"unix://{tmp_path / 's'}", pause=0)
    blocks = [((0, bytes([i]) * 32), bytes([i]) * 64) for i in range(20)]
    keys = [key for key, _ in blocks]
    try:
        one.save(blocks)
        assert settled(one, keys) == dict(blocks)
        for seed in range(35, 38):
            process.kill()
            process.wait()
            assert not fetched(one, "gone", keys)
            WaitingTrial(seed, lambda _, kv: connector(f"unix://{tmp_path / 's'}", pause=0)).run()
            process = start(tmp_path)
            one.save(blocks)
            assert settled(one, keys) == dict(blocks)
    finally:
        one.close()
        process.kill()
        process.wait()


def test_options() -> None:
    with pytest.raises(ValueError, match="url must begin"):
        Options(url="http://x")
