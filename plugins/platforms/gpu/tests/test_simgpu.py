"""The simulated device finds what it is there to find, and the platform keeps its contract on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lmkit.api import EngineError, StepInputs, StepLimits
from lmkit_gpu import GpuPlatform
from lmkit_gpu.graphs import buckets
from lmkit_gpu.platform import COPIES
from lmkit_testing.simgpu import Gpu, Graph, SimError, SimEvent, SimRuntime, simulated
from torch import Tensor


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with simulated() as device:
        yield device


@pytest.fixture
def platform(gpu: Gpu) -> GpuPlatform:
    made = GpuPlatform(SimRuntime())
    made.bind(0)
    return made


class Plan:
    def __init__(self, slots: Tensor) -> None:
        self.slots = slots


def step(tokens: Tensor, capture: bool = True) -> StepInputs:
    return StepInputs(tokens, tokens, [Plan(tokens)], [], tokens, capture=capture)


def test_values_are_those_of_the_cpu(gpu: Gpu) -> None:
    x = torch.randn(5, 7)
    y = (x.to("sim") @ torch.ones(7, 3, device="sim")).relu_().cpu()
    assert torch.equal(y, (x @ torch.ones(7, 3)).relu())


def test_fresh_memory_holds_nonsense(gpu: Gpu) -> None:
    assert torch.empty(4, device="sim", dtype=torch.uint8).cpu().tolist() == [0xA5] * 4


def test_the_pool_gives_freed_memory_again(gpu: Gpu) -> None:
    x = torch.ones(1000, device="sim")
    for _ in range(3):
        y = x + 1
        del y
    assert sum(gpu.pool.misses.values()) == 2


def test_a_copy_from_the_device_arrives_with_its_event(gpu: Gpu, platform: GpuPlatform) -> None:
    x = torch.full((3,), 7, device="sim")
    host = x.to("cpu", non_blocking=True)
    event = platform.event()
    event.record()
    assert not event.query()
    assert host.tolist() != [7, 7, 7]
    event.wait()
    assert event.query()
    assert host.tolist() == [7, 7, 7]
    assert gpu.waits == {"event": 1}


def test_pinned_memory_written_too_early_is_found(gpu: Gpu, platform: GpuPlatform) -> None:
    host, device, event = (
        platform.runtime.pinned((4,), torch.int64),
        torch.zeros(4, dtype=torch.int64).to("sim"),
        SimEvent(),
    )
    for value in (1, 2):
        device.copy_(host, non_blocking=True)
        event.record()
        event.synchronize()
        host[0] = value  # its copy is done
    device.copy_(host, non_blocking=True)
    host[0] = 3
    event.record()
    with pytest.raises(SimError, match="in flight"):
        event.synchronize()


def test_a_buffer_may_be_written_at_once(gpu: Gpu, platform: GpuPlatform) -> None:
    """And waits when as many pushes as it has copies are on their way."""
    buffer = platform.buffer((4,), torch.int64)
    for value in range(COPIES + 1):
        buffer.host[0] = value
        pushed = buffer.push(4)
        buffer.host[0] = -1
    assert gpu.waits == {"event": 1}
    assert pushed.cpu()[0] == COPIES


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: bool(x.any()),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x.copy_(torch.ones(4)),
        lambda x: torch.bincount(x.long()),
    ],
)
def test_every_wait_is_seen(gpu: Gpu, wait: Any) -> None:
    x = torch.zeros(4, device="sim")
    wait(x)
    assert sum(gpu.waits.values()) == 1
    gpu.strict = True
    with pytest.raises(SimError):
        wait(x)
    gpu.strict = False
    with pytest.raises(SimError, match="captured"), Graph().capture():
        wait(x)


def test_operands_of_two_devices_are_refused(gpu: Gpu) -> None:
    with pytest.raises(SimError, match="of the host and of the device"):
        torch.zeros(4, device="sim") + torch.ones(4)


def test_a_graph_replays_on_the_same_memory(gpu: Gpu) -> None:
    x, graph = torch.zeros(4, device="sim"), Graph()
    with graph.capture():
        y = (x * 2).add_(1)
    assert y.cpu().tolist() != [1.0] * 4  # nothing has run yet
    x.fill_(5.0)
    graph.replay()
    assert y.cpu().tolist() == [11.0] * 4


@torch.inference_mode()
def test_a_view_that_copies_is_a_launch(gpu: Gpu) -> None:
    """`reshape` of what lies the other way round: without it a graph would read what was there at its capture."""
    x, graph = torch.zeros(3, 4, device="sim"), Graph()
    with graph.capture():
        y = x.T.reshape(12) + 1
    x.fill_(5.0)
    graph.replay()
    assert y.cpu().tolist() == [6.0] * 12


def test_a_replaced_input_is_found(gpu: Gpu, platform: GpuPlatform) -> None:
    graphs = platform.graphs(StepLimits(8, 8, 1, 8))
    tokens = torch.arange(4, device="sim")

    def double(x: StepInputs) -> torch.Tensor:
        return x.token_ids * 2

    for _ in range(3):
        assert graphs.run(double, step(tokens)).cpu().tolist() == [0, 2, 4, 6]
    assert gpu.launches["graph"] == 2
    with pytest.raises(EngineError, match="moved"):
        graphs.run(double, step(torch.arange(4, device="sim")))


def test_graphs_go_with_what_was_captured(gpu: Gpu, platform: GpuPlatform) -> None:
    graphs, tokens = platform.graphs(StepLimits(8, 8, 1, 8)), torch.arange(4, device="sim")
    for factor in (2, 3):

        def times(x: StepInputs, factor: int = factor) -> torch.Tensor:
            return x.token_ids * factor

        for _ in range(3):
            assert graphs.run(times, step(tokens)).cpu().tolist() == [factor * i for i in range(4)]
    del times
    assert not graphs.graphs


def test_a_capture_writes_nothing(gpu: Gpu) -> None:
    """What is not the graph's own is as it was, until the graph is replayed."""
    total = torch.ones(2, device="sim")
    replay, _ = SimRuntime().capture(lambda: total.add_(1))
    assert total.cpu().tolist() == [1, 1]
    replay()
    replay()
    assert total.cpu().tolist() == [3, 3]


def test_steps_that_no_graph_may_run_run_directly(gpu: Gpu, platform: GpuPlatform) -> None:
    graphs = platform.graphs(StepLimits(8, 8, 1, 8))
    for _ in range(3):
        graphs.run(lambda x: x.token_ids * 2, step(torch.arange(4, device="sim"), capture=False))
    assert "graph" not in gpu.launches


def test_the_hidden_states_of_a_step_outlive_the_next(gpu: Gpu, platform: GpuPlatform) -> None:
    graphs = platform.graphs(StepLimits(8, 8, 1, 8))
    tokens = torch.zeros(4, dtype=torch.int64, device="sim")
    outputs = []
    for n in range(4):
        tokens.fill_(n)
        outputs.append(graphs.run(lambda x: x.token_ids + 1, step(tokens)))
    assert [o.cpu().tolist()[0] for o in outputs] == [1, 2, 3, 4]


@pytest.mark.parametrize("max_rows", [1, 3, 8, 9, 64, 100, 256, 300, 1024])
def test_buckets(max_rows: int) -> None:
    """Every number of rows has one, which is at most a quarter larger beyond a few rows."""
    found = buckets(max_rows)
    assert found == sorted(set(found))
    assert found[-1] == max_rows
    graphs = GpuPlatform(SimRuntime()).graphs(StepLimits(max_rows, 4096, 1, 8))
    for n in range(1, max_rows + 1):
        size = graphs.num_rows(n)
        assert n <= size <= max_rows
        assert size - n < max(8, n / 4)
