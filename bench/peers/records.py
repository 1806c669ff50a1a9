"""The numbers of a run, one JSON line each, written when they are there."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from lmkit_bench.result import Machine, commit, machine, versions


class Sample(msgspec.Struct, tag="sample", frozen=True):
    """One number. `group`: bf16, int8, int4, serve, or limits; `who`: a participant, of limits a group."""

    round: int
    group: str
    workload: str
    who: str
    value: float
    unit: str


class Absent(msgspec.Struct, tag="absent", frozen=True):
    """Why somebody has no number in a part or workload."""

    workload: str
    group: str
    who: str
    reason: str


class Run(msgspec.Struct, tag="run", frozen=True):
    """A start of the driver: where, when, from what."""

    shape: str
    created: str
    machine: Machine
    versions: dict[str, str]
    commit: str


Line = Sample | Absent | Run
_decode = msgspec.json.Decoder(Line).decode


class Records:
    """Reads what a file holds already, appends what comes."""

    def __init__(self, path: Path, shape: str) -> None:
        self.path = path
        lines = [_decode(line) for line in path.read_bytes().splitlines()] if path.exists() else []
        self.runs = [line for line in lines if isinstance(line, Run)]
        self.samples = [line for line in lines if isinstance(line, Sample)]
        self.reasons = {(a.workload, a.group, a.who): a.reason for a in lines if isinstance(a, Absent)}
        self._new_run: Run | None = Run(
            shape, datetime.now(UTC).isoformat(timespec="seconds"), machine(), versions(), commit()
        )

    def has(self, round: int, group: str, workload: str, who: str) -> bool:
        return any((s.round, s.group, s.workload, s.who) == (round, group, workload, who) for s in self.samples)

    def add(self, sample: Sample) -> None:
        self._write(sample)
        self.samples.append(sample)

    def once(self, sample: Sample) -> None:
        """Adds a sample that one run needs a single time."""
        if not self.has(sample.round, sample.group, sample.workload, sample.who):
            self.add(sample)

    def absent(self, why: Absent) -> None:
        print(f"{why.who}: absent from {why.workload}: {why.reason}", flush=True)
        self._write(why)
        self.reasons[why.workload, why.group, why.who] = why.reason

    def by_round(self, group: str, workload: str) -> dict[str, dict[int, float]]:
        """who -> round -> value, in the order of the file."""
        found: dict[str, dict[int, float]] = defaultdict(dict)
        for s in self.samples:
            if (s.group, s.workload) == (group, workload):
                found[s.who][s.round] = s.value
        return dict(found)

    def _write(self, line: Line) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines: list[Line] = [line]
        if self._new_run is not None:
            lines = [self._new_run, line]
            self.runs.append(self._new_run)
            self._new_run = None
        with self.path.open("ab") as file:
            file.writelines(msgspec.json.encode(each) + b"\n" for each in lines)
