"""Everything goes wrong, one thing after another, and all is well after each. Seconds here, minutes in `nox -s chaos`.

CHAOS_SECONDS is the number of seconds for each of the long ones, CHAOS_SEED the first seed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from lmkit.config import from_options
from lmkit_python.llm import AsyncLLM
from lmkit_testing.serving import listening, supervised
from lmkit_worker.sampling import Sampler

from . import stories
from .storm import Storm

SECONDS = float(os.environ.get("CHAOS_SECONDS", "0"))
SEED = int(os.environ.get("CHAOS_SEED", "0"))
long = pytest.mark.skipif(not SECONDS, reason="set CHAOS_SECONDS to a number of seconds, or run `nox -s chaos`")


@pytest.mark.full
def test_no_request_changes_the_answer_of_another() -> None:
    assert stories.tell(SEED + 3, 8)


@pytest.mark.full
def test_a_request_that_changes_the_answer_of_another_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The law can fail: a sampler that looks at the neighbour's logits."""
    real = Sampler.sample

    def sample(self: Sampler, logits: Any, *args: Any) -> Any:
        return real(self, logits.flip(0) if len(logits) > 1 else logits, *args)

    monkeypatch.setattr(Sampler, "sample", sample)
    with pytest.raises(AssertionError, match="in company"):
        stories.tell(SEED + 3, 6)


async def test_a_server_stands_what_happens_to_it() -> None:
    """The engine is the hash-model in a process of its own: it starts at once."""
    async with supervised(delay=0.005) as llm, listening(llm) as url:
        rounds = iter(range(6))
        done = await Storm(llm, url, SEED).run(lambda: next(rounds, None) is not None)
        assert len(set(done)) == 6


@long
def test_stories_for_minutes() -> None:
    end, seed = time.monotonic() + SECONDS, SEED
    while time.monotonic() < end:
        seed += 1
        print("story", seed, stories.tell(seed, 24), flush=True)


@long
async def test_a_real_server_for_minutes(tmp_path: Path) -> None:
    """The demo, with adapters, killed and stopped and attacked."""
    story = stories.Story(SEED, tmp_path, 0)  # for an adapter that fits
    story.close()
    config = from_options({"model": "demo", "max_length": 1024, "kv_memory": "8MiB", "threads": 1, "enable_lora": True})
    llm = await AsyncLLM.start(config, restarts=1000)
    try:
        async with listening(llm) as url:  # type: ignore[arg-type]
            end = time.monotonic() + SECONDS
            done = await Storm(llm, url, SEED, tmp_path / "red").run(lambda: time.monotonic() < end)  # type: ignore[arg-type]
            print(len(done), "blows", flush=True)
    finally:
        await llm.close()
