"""Graphs are captured while nothing runs, after the first answer: each size once, and never beside a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from lmkit.api import EngineRequest, SamplingParams, TokenEvent
from lmkit.engine.core import EngineCore
from lmkit.engine.intake import Intake
from lmkit.engine.loop import Engine, EngineLoop
from lmkit.engine.messages import Command, Events, Failed, Report, Stop, Submit
from lmkit.scheduling.scheduler import Scheduler
from lmkit_gpu import GpuPlatform
from lmkit_gpu.graphs import GpuGraphs
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.one_runner import OneRunner
from lmkit_testing.simgpu import Gpu, SimRuntime, simulated
from lmkit_testing.simsteps import MAX_LENGTH, STEADY, adapter, runner
from lmkit_testing.stepper import ArrivalOrder
from lmkit_testing.toy import ToyPlatform
from lmkit_worker.runner import Runner
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

LIMITS = replace(STEADY, max_rows=4)
SIZES = [1, 2, 4]
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with simulated() as device:
        yield device


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("ahead") / "llama", num_hidden_layers=1, head_dim=16)


class Captures(SimRuntime):
    """Counts captures by the rows of their steps, and asks `look` at each."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu, self.rows = gpu, Counter[int]()
        self.look: Callable[[], None] = lambda: None

    def capture(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.look()
        replay, output = super().capture(work)
        self.rows[len(output)] += 1
        return replay, output


def loop_of(made: Runner, emit: Callable[[Report], None], inbox: SimpleQueue[Command]) -> tuple[EngineCore, EngineLoop]:
    adapters = dict.fromkeys(made.adapters.loaded, lambda: None)
    intake = Intake(512, MAX_LENGTH, adapters=adapters)
    core = EngineCore(Scheduler(LIMITS, made.kv_config, ArrivalOrder()), OneRunner(made, 2), intake)
    return core, EngineLoop(Engine(core, None), emit, inbox)  # type: ignore[arg-type]


def answers(made: Runner, rounds: list[list[EngineRequest]], look: Callable[[EngineCore], None]) -> dict[str, list]:
    """Each round comes when all is done that could be done ahead after the one before; so does the end."""
    inbox: SimpleQueue[Command] = SimpleQueue()
    found: dict[str, list[int]] = {}

    def emit(report: Report) -> None:
        assert not isinstance(report, Failed), report
        for event in report.events if isinstance(report, Events) else []:
            assert isinstance(event, TokenEvent)
            assert event.error is None, event.error
            found.setdefault(event.id, []).extend(event.tokens)

    core, loop = loop_of(made, emit, inbox)
    look(core)
    ahead, waiting = core.work_ahead, list(rounds)

    def work_ahead() -> bool:
        if ahead():
            return True
        for command in [Submit(request) for request in waiting.pop(0)] if waiting else [Stop()]:
            inbox.put(command)
        return False

    core.work_ahead = work_ahead  # type: ignore[method-assign]
    assert loop.run()
    made.check()
    return found


def asked(prefix: str, num: int, adapter: str | None = None) -> list[EngineRequest]:
    return [EngineRequest(f"{prefix}{i}", [5 + i, 6, 7, 8] * 5, PARAMS, adapter=adapter) for i in range(num)]


@pytest.mark.full
def test_sizes_are_captured_when_nothing_runs(gpu: Gpu, checkpoint: Path) -> None:
    """Not before the first answer, each size once, beside no step; later steps only replay. Tokens are the CPU's, with
    blocks that a first request left to be found."""
    rounds = [asked("a", 1), [*asked("b", 3), *asked("c", 1)]]  # the first of "b" finds the block of "a"
    cpu, _ = runner(checkpoint, ToyPlatform(), torch.device("cpu"), LIMITS, "triton")
    expected = answers(cpu, rounds, lambda core: None)

    runtime = Captures(gpu)
    platform = GpuPlatform(runtime)
    made, _ = runner(checkpoint, platform, platform.bind(0), LIMITS, "triton")
    made.warm()
    assert runtime.rows == {1: 1, 2: 1}, "ready waits for the graphs of one row and of two"
    answered: list[EngineCore] = []

    def look() -> None:
        (core,) = answered
        assert not core.has_work()
        assert core._largest, "a request was answered"
        assert not gpu.arriving, "the host has read all that it was to read"

    runtime.look = look
    found = answers(made, rounds, answered.append)
    assert found == expected
    assert runtime.rows == dict.fromkeys(SIZES, 1)
    assert gpu.launches["graph"] > 8


@pytest.mark.slow
def test_steps_with_adapters_have_graphs_of_their_own(gpu: Gpu, checkpoint: Path) -> None:
    runtime = Captures(gpu)
    platform = GpuPlatform(runtime)
    made, _ = runner(checkpoint, platform, platform.bind(0), LIMITS, "triton")
    assert isinstance(made.model, torch.nn.Module)
    made.adapters.load(adapter(made.model, "one", 2))
    rounds = [asked("a", 2, "one"), asked("b", 2)]
    found = answers(made, rounds, lambda core: None)
    assert runtime.rows == dict.fromkeys(SIZES, 2)
    assert set(map(len, found.values())) == {PARAMS.max_tokens}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["a block", "twice"])
def test_faults_are_found(gpu: Gpu, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Rows of captured steps that write to a block that somebody holds; a size that is captured again."""
    if fault == "twice":
        run = GpuGraphs.run

        def again(self: GpuGraphs, forward, x):
            if x.capture and (graphs := self.graphs.get(forward)) and graphs.get(1) is not None:
                graphs[1] = None
            return run(self, forward, x)

        monkeypatch.setattr(GpuGraphs, "run", again)
    else:
        from lmkit_worker.inputs import InputBuilder

        pad = InputBuilder._pad

        def written(self: InputBuilder, n: int, end: int) -> None:
            pad(self, n, end)
            for slots in self.slots:
                slots.array[n:end] = 16  # the first place of block 1
            self.seq_len.array[n:end] = 1

        monkeypatch.setattr(InputBuilder, "_pad", written)
    with pytest.raises(AssertionError):
        test_sizes_are_captured_when_nothing_runs(gpu, checkpoint)
