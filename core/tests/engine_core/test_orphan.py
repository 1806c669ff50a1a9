"""An engine process whose parent disappears ends by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from time import perf_counter, sleep

PARENT = """
import asyncio, sys
from lmkit.engine.client import ProcessClient
from lmkit_testing.engines import HASH_FACTORY, hash_config, no_checkpoint, no_plan
from lmkit.api import EngineRequest, SamplingParams

async def main():
    client = ProcessClient(hash_config(delay=0.01), no_plan(), no_checkpoint(), factory=HASH_FACTORY)
    await client.start()
    stream = client.submit(EngineRequest("a", [1], SamplingParams(max_tokens=3000)))
    await anext(stream)
    print(client.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_parent_death_ends_the_engine() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        engine = int(parent.stdout.readline())
        assert Path(f"/proc/{engine}").exists()
        os.kill(parent.pid, signal.SIGKILL)
        deadline = perf_counter() + 5
        while _alive(engine):
            assert perf_counter() < deadline, "the engine outlives its parent"
            sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
