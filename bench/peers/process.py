"""An engine as a process of the driver, spoken to in JSON lines (see protocol.py)."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from lmkit_bench.server import resident, tree
from protocol import Load

LOAD_SECONDS, RUN_SECONDS = 900.0, 900.0
LOG_BYTES = 600  # shown of the log of an engine that died


class EngineFailed(Exception):
    """The engine said no, fell silent, or ended; the text says why."""


def peak_resident(pid: int) -> int:
    """The most bytes a process ever had in memory."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it ended meanwhile
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


def mapped(pid: int, folder: Path) -> int:
    """Bytes in memory of files in a folder: counted as `resident` counts them."""
    found, inside = 0, False
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    except OSError:  # it ended meanwhile
        return 0
    for line in lines:
        if re.match(r"[0-9a-f]+-", line):  # a mapping: addresses, rights, offset, device, inode, path
            inside = line.partition("/")[2].startswith(f"{folder.resolve()}/"[1:])
        elif inside and line.startswith("Pss:"):
            found += int(line.split()[1]) * 1024
    return found


class EngineProcess:
    """Starts an engine and loads its model. `ready_after`: seconds from the start of the process until loaded."""

    def __init__(self, command: Sequence[str], load: Load) -> None:
        self._model = Path(load.model)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        began = perf_counter()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, process_group=0,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip
        try:
            self.facts: dict[str, float] = self._ask(LOAD_SECONDS, do="load", **asdict(load))["facts"]
        except BaseException:
            self.close()
            raise
        self.ready_after = perf_counter() - began

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[float]]:
        """Seconds at which each output token of each prompt was there. Raises EngineFailed."""
        times = self._ask(RUN_SECONDS, do="run", prompts=prompts, tokens=tokens)["tokens"]
        counts = {len(row) for row in times}
        if counts != {tokens}:
            raise EngineFailed(f"asked for {tokens} tokens, got {sorted(counts)}")
        return times

    def resident(self) -> int:
        """Bytes in memory, of the engine and its children."""
        return sum(map(resident, tree(self._process.pid)))

    def mapped(self) -> int:
        """Bytes of `resident` that are pages of the checkpoint's files."""
        return sum(mapped(pid, self._model) for pid in tree(self._process.pid))

    def peak(self) -> int:
        """The most bytes it ever had in memory."""
        return sum(map(peak_resident, tree(self._process.pid)))

    def _ask(self, timeout: float, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as e:
            raise EngineFailed(self._last_words()) from e
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout):
                raise EngineFailed(f"no answer within {timeout:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise EngineFailed(self._last_words())
        answer = json.loads(line)
        if "error" in answer:
            raise EngineFailed(answer["error"])
        return answer

    def _last_words(self) -> str:
        status = self._process.wait(30)
        self._log.seek(0)
        text = self._log.read()[-LOG_BYTES:].decode(errors="replace").strip()
        return f"ended with status {status}: {text}"

    def close(self) -> None:
        """Ends it, gently first. Idempotent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(10)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
        with suppress(ProcessLookupError):  # children that outlive it
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.stdout.close()
        self._log.close()
