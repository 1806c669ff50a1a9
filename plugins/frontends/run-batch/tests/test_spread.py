"""Batches in blocks: each file is there whole or not at all, and once."""

from __future__ import annotations

import gc
import json
import warnings
from pathlib import Path

import pytest
from lmkit.api import ConfigError
from lmkit.config import CacheConfig, EngineConfig, ModelConfig
from lmkit_run_batch.lines import Line, read_lines
from lmkit_run_batch.spread import cut, prepare, spread


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    lines = []
    for i in range(7):
        body = {"messages": [{"role": "user", "content": f"What is {i + 10} + 21?"}], "temperature": 0}
        lines.append(json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body}))
    path.write_text("\n".join(lines))
    return path


def test_blocks_have_all_lines_once(requests: Path) -> None:
    found = [
        [line.custom_id for line in read_lines(requests, block.begin, block.end) if isinstance(line, Line)]
        for block in cut(requests, 3)
    ]
    assert found == [["0", "1", "2"], ["3", "4", "5"], ["6"]]


def test_blocks_that_are_there_are_skipped(requests: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    blocks = prepare(requests, folder, 3, resume=False)
    assert [block.number for block in blocks] == [0, 1, 2]
    blocks[1].path(folder).write_text("")
    assert [block.number for block in prepare(requests, folder, 3, resume=True)] == [0, 2]
    with pytest.raises(ConfigError, match="something in it"):
        prepare(requests, folder, 3, resume=False)
    with pytest.raises(ConfigError, match="another input"):
        prepare(requests, folder, 4, resume=True)
    with pytest.raises(ConfigError, match="something else"):
        prepare(requests, tmp_path, 3, resume=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*")  # of its own settings
def test_a_batch_over_ray(requests: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray.data", reason="Ray Data is not installed: pip install 'lmkit-run-batch[ray]'")
    folder = tmp_path / "out"
    blocks = prepare(requests, folder, 3, resume=False)
    blocks[1].path(folder).write_text("was there\n")
    config = EngineConfig(model=ModelConfig(model="demo"), cache=CacheConfig(num_blocks=400))
    left = prepare(requests, folder, 3, resume=True)
    with warnings.catch_warnings():  # Ray leaves its processes to the system
        warnings.simplefilter("ignore", ResourceWarning)
        counts = list(spread(config, "local", requests, folder, left, engines=1))
        gc.collect()
    assert sorted(counts) == [(1, 0), (3, 0)]
    assert sorted(path.name for path in folder.iterdir()) == ["blocks.json", *(b.path(folder).name for b in blocks)]
    assert blocks[1].path(folder).read_text() == "was there\n"
    said = {}
    for block in (blocks[0], blocks[2]):
        for line in block.path(folder).read_text().splitlines():
            result = json.loads(line)
            said[result["custom_id"]] = result["response"]["body"]["choices"][0]["message"]["content"]
    assert said == {str(i): f"{i + 10} + 21 = {i + 31}" for i in (0, 1, 2, 6)}
