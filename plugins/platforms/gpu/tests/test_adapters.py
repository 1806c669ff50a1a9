"""Adapters on the simulated device: steps that have some are captured like others, and the host waits for nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from lmkit.api import LmkitError, SamplingParams
from lmkit_gpu import GpuPlatform
from lmkit_gpu.graphs import GpuGraphs
from lmkit_layers.adapter_tables import AdapterTable, AdapterTokens
from lmkit_layers.adapters import AdapterBank
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.simgpu import Gpu, SimRuntime, simulated
from lmkit_testing.simsteps import STEADY, adapter, play, played, runner
from lmkit_testing.toy import ToyPlatform
from lmkit_worker.inputs import InputBuilder

pytest.importorskip("triton", reason="triton is not installed")

PARAMS = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
MIXED = ("one", None, "another")
Patches = list[tuple[object, str, object]]


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with simulated() as device:
        yield device


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("lora") / "llama", num_hidden_layers=1, head_dim=16)


def expected(checkpoint: Path, adapters: tuple[str | None, ...] = MIXED) -> dict[str, list[int]]:
    return played(play(checkpoint, ToyPlatform(), torch.device("cpu"), PARAMS, 1, adapters))


def checked(gpu: Gpu, checkpoint: Path) -> dict[str, list[int]]:
    """The tokens, after asserting what a step under way may do."""
    platform = GpuPlatform(SimRuntime())
    found: dict[str, list[int]] = {}
    for number, events in enumerate(play(checkpoint, platform, platform.bind(0), PARAMS, adapters=MIXED)):
        for event in events:
            assert event.error is None, event.error
            found.setdefault(event.id, []).extend(event.tokens)
        if 6 <= number < 9:
            assert gpu.waits == {"event": 1}
            assert not gpu.pageable
            assert not gpu.pool.misses
            assert gpu.launches["graph"] == 1
            assert gpu.launches.total() <= 32, "a graph, copies, the head and its adapters, sampling"
        gc.collect()
        gpu.clear()
    return found


@pytest.mark.full("lmkit-gpu", "lmkit-op-triton", "lmkit-worker")
def test_a_step_with_adapters_is_a_graph(gpu: Gpu, checkpoint: Path) -> None:
    """Rows with two adapters and with none, in one step: the tokens are the CPU's."""
    assert checked(gpu, checkpoint) == expected(checkpoint)


@pytest.mark.slow
def test_adapters_come_and_go(gpu: Gpu, checkpoint: Path) -> None:
    come_and_go(gpu, checkpoint)


def come_and_go(gpu: Gpu, checkpoint: Path) -> None:
    """Graphs of one set of adapters are not those of another, nor of steps without; an old set leaves no memory."""
    platform = GpuPlatform(SimRuntime())
    made, _ = runner(checkpoint, platform, platform.bind(0), STEADY, "triton")
    taken, answers = [], []
    for adapters in (MIXED, (None,) * 3, ("another",) * 3, MIXED, (None, "third", None), MIXED):
        if "third" not in adapters:
            made.adapters.drop("third")
        found = played(play(checkpoint, platform, torch.device("sim", 0), PARAMS, adapters=adapters, made=made))
        if "third" not in adapters:
            assert found == expected(checkpoint, adapters)
        answers.append(found)
        gc.collect()
        taken.append(gpu.pool.live)
        made.check()
    assert answers[0] == answers[3] != answers[1] != answers[2]
    assert taken[-1] - taken[3] < 64 << 10
    assert len(made.graphs.graphs) == 2, "of steps without adapters, and of those that are loaded"


def test_a_row_keeps_the_adapter_that_its_name_meant(checkpoint: Path) -> None:
    """Until it ends; then the adapter's memory goes."""
    made, _ = runner(checkpoint, ToyPlatform(), torch.device("cpu"), STEADY)
    bank, model = made.adapters, made.model
    assert isinstance(model, torch.nn.Module)
    bank.load(adapter(model, "a", 2))
    bank.put(0, "a")
    bank.load(adapter(model, "a", 3))
    bank.put(1, "a")
    assert bank.of_slot[:3].tolist() == [0, 1, -1]
    assert {len(table.owners) for table in bank.tables.tables.values()} >= {5}
    bank.remove(0)
    assert {len(table.owners) for table in bank.tables.tables.values() if len(table.spans) == 1} == {3}
    bank.drop("a")
    assert bank.of(np.array([0, 1])) is not None
    bank.remove(1)
    assert not bank.used
    assert not bank.tables.tables


# ------------------------------------------------------------------------------------------ faults put in on purpose


def kept_by_all() -> Patches:
    """Every token gets what all adapters add."""
    return [(AdapterTokens, "others", lambda self, owners: torch.zeros_like(self._owners[owners]).bool()[None])]


def asked_of_the_device() -> Patches:
    """The host asks which tokens an adapter has."""
    real = AdapterTable.add

    def add(self, module, x, out, tokens):
        tokens.adapters.tolist()
        return real(self, module, x, out, tokens)

    return [(AdapterTable, "add", add)]


def one_graph_for_all() -> Patches:
    """A graph of a number of rows, whatever was captured."""
    real = GpuGraphs.run
    first: list[object] = []

    def run(self, forward, x):
        first.append(forward)
        return real(self, first[0], x)

    return [(GpuGraphs, "run", run)]


def not_sent() -> Patches:
    """The adapters of the tokens stay those of the step that was captured."""
    return [(InputBuilder, "push_adapters", lambda self, adapters: self.adapters.push(0).new_zeros(len(adapters)))]


def of_the_neighbour() -> Patches:
    real = AdapterBank.of
    return [(AdapterBank, "of", lambda self, slots: real(self, (slots + 1) % len(self.of_slot)))]


def from_pageable_memory() -> Patches:
    return [
        (
            InputBuilder, "push_adapters",
            lambda self, adapters: self.adapters.buffer.device[: len(adapters)].copy_(torch.from_numpy(adapters)),
        )
    ]  # fmt: skip


def same(gpu: Gpu, checkpoint: Path, tokens: dict[str, list[int]]) -> None:
    assert checked(gpu, checkpoint) == tokens
    come_and_go(gpu, checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [kept_by_all, asked_of_the_device, not_sent, of_the_neighbour, from_pageable_memory, one_graph_for_all]
)
def test_faults_are_found(gpu: Gpu, checkpoint: Path, fault: Callable[[], Patches]) -> None:
    tokens = expected(checkpoint)
    with ExitStack() as patched:
        for patch in fault():
            patched.enter_context(mock.patch.object(*patch))
        with pytest.raises((AssertionError, LmkitError, RuntimeError)):
            same(gpu, checkpoint, tokens)
