"""The comparison with peers: engines as processes, interleaving, resumption, ratios. With a fake engine."""

from __future__ import annotations

import importlib
import mmap
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PEERS = Path(__file__).resolve().parents[2] / "bench" / "peers"
NAMES = ("environments", "protocol", "process", "participants", "records", "workloads", "servers", "report", "run")
FAKE = """
import time
from protocol import Load, serve

class Fake:
    facts = {"weight bytes": 1000.0}
    def __init__(self, load):
        if load.model == "damaged":
            raise ValueError("cannot read it")
        self.step = float(load.model)
    def run(self, prompts, tokens):
        print("noise on stdout")
        if tokens == 13:
            raise SystemExit(3)
        return [[len(p) * self.step + i * self.step for i in range(tokens)] for p in prompts]

serve(Fake)
"""


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules of bench/peers, which are scripts beside each other."""
    monkeypatch.syspath_prepend(str(PEERS))
    yield {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture
def fake(tmp_path: Path) -> list[str]:
    file = tmp_path / "fake.py"
    file.write_text(f"import sys\nsys.path.insert(0, {str(PEERS)!r})\n{FAKE}")
    return [sys.executable, str(file)]


def load(peers: dict[str, ModuleType], model: str) -> Any:
    return peers["protocol"].Load(model=model, weights="bf16", threads=1, max_length=64, max_rows=2)


def test_an_engine_process(peers: dict[str, ModuleType], fake: list[str]) -> None:
    engine = peers["process"].EngineProcess(fake, load(peers, "0.5"))
    try:
        assert engine.facts == {"weight bytes": 1000.0}
        assert engine.run([[1, 2], [1]], 3) == [[1.0, 1.5, 2.0], [0.5, 1.0, 1.5]]
        assert engine.ready_after > 0
        assert engine.resident() > 1 << 20
    finally:
        engine.close()


def test_an_engine_that_refuses_or_dies_says_why(peers: dict[str, ModuleType], fake: list[str]) -> None:
    failed = peers["process"].EngineFailed
    with pytest.raises(failed, match="cannot read it"):
        peers["process"].EngineProcess(fake, load(peers, "damaged"))
    engine = peers["process"].EngineProcess(fake, load(peers, "1"))
    with pytest.raises(failed, match="ended with status 3"):
        engine.run([[1]], 13)
    engine.close()


def test_pages_of_a_checkpoint_are_told_apart(peers: dict[str, ModuleType], tmp_path: Path) -> None:
    if not Path("/proc/self/smaps").exists():
        pytest.skip("this system does not list a process's mappings")
    mapped, folder = peers["process"].mapped, tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_bytes(b"x" * (1 << 20))
    assert mapped(os.getpid(), folder) == 0
    with (folder / "weights").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert pages.rfind(b"y") == -1  # every page was read
        assert mapped(os.getpid(), folder) == 1 << 20
        assert mapped(os.getpid(), tmp_path / "mod") == 0


def test_numbers_of_the_workloads(peers: dict[str, ModuleType]) -> None:
    w = peers["workloads"]

    class Engine:
        def run(self, prompts: list[list[int]], tokens: int) -> list[list[float]]:
            """A second per prompt token, a tenth per output token; a known beginning costs nothing."""
            known = getattr(self, "known", [])
            self.known = prompts[0]
            rows = []
            for prompt in prompts:
                same = next((i for i, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b), 0)
                rows.append([len(prompt) - same + i / 10 for i in range(tokens)])
            return rows

    assert w.decode(Engine(), 1) == pytest.approx(10)
    assert w.prefill(Engine(), 1) == pytest.approx(1)
    assert w.batch(Engine(), 1) == pytest.approx(16 * 64 / (128 + 6.3))
    assert w.prefix(Engine(), 1) == pytest.approx(32 / 2080)
    assert w.prompts(2, 40, 5, 30)[0][:30] == w.prompts(2, 40, 5, 30)[1][:30]


@pytest.fixture
def arena(peers: dict[str, ModuleType], fake: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """Two engines of which ours is twice as fast, and one without an environment."""
    p = peers["participants"]
    members = tuple(
        p.Participant(name, name.split()[0], "bf16", "bf16", lambda shape, step=step: Path(step))
        for name, step in (("lmkit bf16", "0.001"), ("llamacpp bf16", "0.002"), ("vllm bf16", "1"))
    )
    monkeypatch.setattr(p.Participant, "command", lambda self, root: fake)
    monkeypatch.setattr(peers["environments"], "is_complete", lambda peer, root: peer == "llamacpp")
    monkeypatch.setattr(peers["run"], "measure_limits", lambda *_: None)
    monkeypatch.setattr(peers["report"], "PARTICIPANTS", members)
    return Namespace(members=members, root=tmp_path, models=tmp_path, threads=1, rounds=2)


def test_rounds_resume_and_report(peers: dict[str, ModuleType], arena: Namespace, tmp_path: Path) -> None:
    records = peers["records"].Records(tmp_path / "r.jsonl", "tiny")
    workloads = peers["workloads"].MAIN[:3]
    peers["run"].measure_group(arena.members, workloads[:2], arena, records, "main")
    found = records.by_round("bf16", "decode")
    assert found["lmkit bf16"] == {0: pytest.approx(1000), 1: pytest.approx(1000)}
    assert found["llamacpp bf16"] == {0: pytest.approx(500), 1: pytest.approx(500)}
    assert "no environment" in records.reasons["main", "bf16", "vllm bf16"]

    again = peers["records"].Records(tmp_path / "r.jsonl", "tiny")
    assert again.samples == records.samples
    arena.rounds = 3
    peers["run"].measure_group(arena.members, workloads, arena, again, "main")
    assert set(again.by_round("bf16", "decode")["lmkit bf16"]) == {0, 1, 2}
    assert len([s for s in again.samples if s.workload == "decode"]) == 6

    best, ratio = peers["report"].best_peer(again, arena.members[0], workloads[0])
    assert (best, ratio.value) == ("llamacpp bf16", pytest.approx(2.0))
    text = peers["report"].write(again, tmp_path, "r")
    assert "| lmkit bf16 | prefill 2048 | llamacpp bf16 | 2.00x (2.00 to 2.00) | 1.10x |" in text
    assert "vllm bf16, main: no environment" in text
    assert (tmp_path / "r.md").read_text() == text

    page = tmp_path / "bench.md"
    first, last = peers["report"].PAGE_MARKS
    page.write_text(f"before\n{first}\nold\n{last}\nafter\n")
    for _ in range(2):  # the second time it finds its own table
        peers["report"].into_page(again, "r", page)
        text = page.read_text()
        assert text.startswith(f"before\n{first}\ntiny, ")
        assert text.endswith(f"\n\n{last}\nafter\n")
        assert text.count("| prefill 2048 |") == 1
        assert "old" not in text


def test_the_bound_of_a_round(peers: dict[str, ModuleType], arena: Namespace, tmp_path: Path) -> None:
    """1 GB/s, 1 MB of weights, 1 GFLOP/s, 500 thousand parameters in linears and none in the head."""
    r = peers["records"]
    records = r.Records(tmp_path / "r.jsonl", "tiny")
    for workload, value in (("read", 1e9), ("bfloat16", 1e9)):
        records.add(r.Sample(0, "limits", workload, "bf16", value, ""))
    records.add(r.Sample(0, "bf16", "weight bytes", "lmkit bf16", 1e6, "B"))
    bound, shape = peers["report"].bound, peers["report"].Shape(500_000, 0)
    ours = arena.members[0]
    assert bound(records, shape, ours, "decode", 0) == pytest.approx(1000)
    assert bound(records, shape, ours, "prefill", 0) == pytest.approx(1000)
    assert bound(records, shape, ours, "batch16", 0) == pytest.approx(1024 / (2.048 + 64 * 0.016))
    assert bound(records, shape, ours, "decode", 1) is None


def test_every_participant_has_an_engine_script(peers: dict[str, ModuleType]) -> None:
    for p in peers["participants"].PARTICIPANTS:
        assert (PEERS / f"engine_{p.peer}.py").exists()
    assert set(peers["environments"].MAKERS) == set(peers["environments"].PEERS)
