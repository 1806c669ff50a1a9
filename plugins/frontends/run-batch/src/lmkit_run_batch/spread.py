"""A batch over a Ray cluster, by Ray Data: the input is cut into blocks, and each becomes one file, whole or not there.

A block may be answered twice, where a node dies; its file is written under another name and renamed, so there is one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec
from lmkit.api import ConfigError

from lmkit_run_batch.lines import Line, read_lines
from lmkit_run_batch.play import play, while_alive
from lmkit_run_batch.results import Results

if TYPE_CHECKING:
    from lmkit.config import EngineConfig

MANIFEST = "blocks.json"
INSTALL = "pip install 'lmkit-run-batch[ray]' on each node"


class Manifest(msgspec.Struct):
    """What the files of a folder are results of, as far as path, length and blocks tell. Only by the same is a folder
    gone on with."""

    input: str
    size: int
    rows: int


class Block(msgspec.Struct):
    """Some lines of the input."""

    number: int
    begin: int
    end: int

    def path(self, folder: Path) -> Path:
        return folder / f"part-{self.number:06}.jsonl"


def cut(path: Path, rows: int) -> Iterator[Block]:
    """The input in blocks of so many lines."""
    number = begin = end = lines = 0
    with path.open("rb") as file:
        for line in file:
            end += len(line)
            lines += 1
            if lines == rows:
                yield Block(number, begin, end)
                number, begin, lines = number + 1, end, 0
    if lines:
        yield Block(number, begin, end)


def prepare(path: Path, folder: Path, rows: int, resume: bool) -> list[Block]:
    """Blocks that have no file yet. Raises ConfigError for a folder of something else."""
    wanted, found = Manifest(str(path.resolve()), path.stat().st_size, rows), folder / MANIFEST
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if found.exists():
            if msgspec.json.decode(found.read_bytes(), type=Manifest) != wanted:
                raise ConfigError(f"{folder} has results of another input, or in other blocks", fix="another folder")
            if not resume:
                raise ConfigError(f"{folder} has something in it", fix="say --resume to go on with it")
        elif any(folder.iterdir()):
            raise ConfigError(f"{folder} has files of something else", fix="choose another folder")
        else:
            found.write_bytes(msgspec.json.encode(wanted))
    except (OSError, msgspec.DecodeError) as e:
        raise ConfigError(f"{folder} cannot be used: {e}", fix="choose another folder") from e
    return [block for block in cut(path, rows) if not block.path(folder).exists()]


class Answers:
    """An actor of Ray Data: one engine, which answers a block at a time."""

    def __init__(self, config: dict[str, Any], path: str, folder: str) -> None:
        self._path, self._folder = Path(path), Path(folder)
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, name="lmkit-batch", daemon=True).start()
        self._run(self._start(config))

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[int]]:
        blocks = zip(*(batch[name].tolist() for name in ("number", "begin", "end")), strict=True)
        counts = [self._run(self._answer(Block(*block))) for block in blocks]
        return {"completed": [done for done, _ in counts], "failed": [failed for _, failed in counts]}

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self, config: dict[str, Any]) -> None:
        from lmkit.config import from_dict
        from lmkit_http.app import build_app
        from lmkit_http.background import Background
        from lmkit_http.dialects import installed_dialects
        from lmkit_http.settings import ServerSettings
        from lmkit_python.front.run import at_once
        from lmkit_python.llm import AsyncLLM

        dialects = installed_dialects()
        made = from_dict(config)
        self._llm = await AsyncLLM.start(made)
        app = build_app(self._llm, ServerSettings(served_names=made.model.names), dialects)
        self._ask = Background(app.state.backend, dialects, at_once(self._llm.client)).answer

    async def _answer(self, block: Block) -> tuple[int, int]:
        """How many requests were answered, and how many failed."""
        path = block.path(self._folder)
        passing = path.with_name(f".{path.name}.{uuid4().hex}")
        results = Results(passing, passing)
        try:
            lines = (line for line in read_lines(self._path, block.begin, block.end) if isinstance(line, Line))
            await while_alive(self._llm.client, play(lines, results, self._ask))
            results.close()
            os.replace(passing, path)
        finally:
            results.close()
            passing.unlink(missing_ok=True)
        return results.num_completed, results.num_failed


def spread(
    config: EngineConfig, address: str, path: Path, folder: Path, blocks: list[Block], engines: int
) -> Iterator[tuple[int, int]]:
    """Answers the blocks. Yields for each how many requests were answered, and how many failed."""
    try:
        import ray
        from lmkit_executor_ray.cluster import connect
    except ImportError as e:
        raise ConfigError(f"--ray: {e.name} is not installed", fix=INSTALL) from None
    from lmkit.config import to_dict

    threads = config.parallel.threads or 1
    connect(address, engines * threads + 1)
    from ray.data import ActorPoolStrategy, DataContext, from_items

    DataContext.get_current().enable_progress_bars = False
    rows = from_items([msgspec.structs.asdict(block) for block in blocks], override_num_blocks=len(blocks))
    made = rows.map_batches(
        Answers, batch_size=1, num_cpus=threads, compute=ActorPoolStrategy(size=min(engines, len(blocks))),
        fn_constructor_args=(to_dict(config), str(path.resolve()), str(folder.resolve())),
    )  # fmt: skip
    try:
        for row in made.iter_rows():
            yield row["completed"], row["failed"]
    finally:
        ray.shutdown()
