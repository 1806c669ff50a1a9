"""Several queues of the simulated device: what is ordered passes, and faults put in on purpose are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Thread

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit_gpu import GpuPlatform, ring
from lmkit_gpu.ring import PinnedRing
from lmkit_testing.simgpu import Gpu, Graph, Queue, SimError, SimEvent, SimRuntime, simulated
from torch import Tensor


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with simulated() as device:
        yield device


def ones() -> Tensor:
    return torch.ones(256, device="sim")


def behind(first: Queue, then: Queue) -> None:
    """What is launched next in `then` comes after all that is in `first`."""
    event = SimEvent()
    event.record(first)
    then.wait_event(event)


def test_what_is_ordered_passes(gpu: Gpu) -> None:
    copies, steps = Queue(), Queue()
    host = SimRuntime().pinned((256,), torch.float32)
    host.fill_(3)
    with copies:
        x = torch.empty(256, device="sim")
        x.copy_(host, non_blocking=True)
    behind(copies, steps)
    with steps:
        x += 1
        y = x * 2
    behind(steps, copies)
    with copies:
        back = y.to("cpu", non_blocking=True)
        x.zero_()
    copies.synchronize()
    assert back.tolist() == [8.0] * 256
    del x, y
    with copies:
        assert ones().sum().item() == 256


def test_halves_of_a_buffer_may_be_used_at_once(gpu: Gpu) -> None:
    x, other = ones(), Queue()
    behind(gpu.queue, other)
    x[:128].add_(1)
    with other:
        x[128:].add_(2)
    gpu.synchronize()
    assert x.cpu().tolist() == [2.0] * 128 + [3.0] * 128


def test_both_may_read(gpu: Gpu) -> None:
    x, other = ones(), Queue()
    behind(gpu.queue, other)
    y = x + 1
    with other:
        z = x + 2
    gpu.synchronize()
    assert float((y + z).sum().cpu()) == 256 * 5


def test_memory_that_the_allocator_was_told_of_is_held_back(gpu: Gpu) -> None:
    x, other = ones(), Queue()
    behind(gpu.queue, other)
    with other:
        y = x + 1
    x.record_stream(other)
    live = gpu.pool.live
    del x
    z = ones()
    assert gpu.pool.live > live, "it is not free yet"
    other.synchronize()
    misses = sum(gpu.pool.misses.values())
    w = ones()
    assert sum(gpu.pool.misses.values()) == misses, "now it is"
    assert [float(t.sum().cpu()) for t in (y, z, w)] == [512, 256, 256]


# ------------------------------------------------------------------------------------------ faults put in on purpose


def read_without_an_event() -> None:
    x, other = ones(), Queue()
    with other:
        x + 1


def written_while_it_is_read() -> None:
    x, other = ones(), Queue()
    behind(Queue(), other)
    gpu_queue = x + 1  # the first queue reads
    with other:
        x.zero_()
    del gpu_queue


def both_write() -> None:
    x, other = ones(), Queue()
    other.wait_stream(_first())
    x.add_(1)
    with other:
        x.add_(2)


def event_recorded_too_early() -> None:
    event, other, x = SimEvent(), Queue(), ones()
    event.record()
    x.add_(1)
    other.wait_event(event)
    with other:
        x * 2


def event_of_another_queue() -> None:
    copies, other, x = Queue(), Queue(), ones()
    behind(_first(), copies)
    with copies:
        x.add_(1)
    behind(_first(), other)
    with other:
        x * 2


def freed_while_it_is_used() -> None:
    """Nobody told the allocator, and the next who gets memory may get this."""
    x, other = ones(), Queue()
    behind(_first(), other)
    with other:
        y = x + 1
    del x
    ones()
    del y


def result_dropped_in_the_other_queue() -> None:
    """Made on a side queue, read by the first one, and freed there: the side queue gives it out again."""
    side = Queue()
    with side:
        x = ones()
    behind(side, _first())
    y = x + 1
    del x
    with side:
        ones()
    del y


def told_of_another_queue() -> None:
    x, other = ones(), Queue()
    behind(_first(), other)
    with other:
        y = x + 1
    x.record_stream(Queue())
    del x
    ones()
    del y


def graph_without_its_inputs() -> None:
    """The inputs of a graph are copied in a queue of their own, for which the replay does not wait."""
    x, graph, copies = ones(), Graph(), Queue()
    with graph.capture():
        x * 2
    behind(_first(), copies)
    with copies:
        x.fill_(5.0)
    graph.replay()


def inputs_overwritten_under_a_graph() -> None:
    x, graph, copies = ones(), Graph(), Queue()
    with graph.capture():
        x * 2
    behind(_first(), copies)
    graph.replay()
    with copies:
        x.fill_(5.0)


def pinned_memory_written_behind_another_event() -> None:
    host, x, copies = SimRuntime().pinned((256,), torch.float32), ones(), Queue()
    behind(_first(), copies)
    with copies:
        x.copy_(host, non_blocking=True)
    event = SimEvent()
    event.record()  # in the queue of the thread
    event.synchronize()
    host.fill_(1)
    copies.synchronize()


def thread_without_a_queue() -> None:
    """It works in the first one, which waits for nobody."""
    SimRuntime().select(0)
    x, raised = ones(), []

    def work() -> None:
        try:
            x.add_(1)
        except SimError as e:
            raised.append(e)

    thread = Thread(target=work)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def piece_sent_in_a_queue_of_its_own() -> None:
    """Weights that are loaded beside steps, which do not wait for them."""
    platform = GpuPlatform(SimRuntime())
    device, copies = platform.bind(0), Queue()
    sender = PinnedRing(platform.runtime, device)
    with copies:
        weight = sender.upload(torch.ones(64, 64))
    sender.close()
    torch.ones(1, 64, device=device) @ weight


def _first() -> Queue:
    from lmkit_testing.simgpu import gpu

    return gpu.queue


FAULTS: dict[Callable[[], None], str] = {
    read_without_an_event: "waits for no event",
    written_while_it_is_read: "waits for no event",
    both_write: "waits for no event",
    event_recorded_too_early: "waits for no event",
    event_of_another_queue: "waits for no event",
    freed_while_it_is_used: "was freed while",
    result_dropped_in_the_other_queue: "was freed while",
    told_of_another_queue: "was freed while",
    graph_without_its_inputs: "waits for no event",
    inputs_overwritten_under_a_graph: "waits for no event",
    pinned_memory_written_behind_another_event: "in flight",
    thread_without_a_queue: "waits for no event",
    piece_sent_in_a_queue_of_its_own: "waits for no event",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_are_found(gpu: Gpu, fault: Callable[[], None]) -> None:
    with pytest.raises(SimError, match=FAULTS[fault]):
        fault()


def test_weights_sent_in_a_queue_of_their_own(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring in pieces that are used again and again, with an event behind it: values and order are right."""
    monkeypatch.setattr(ring, "PIECE", 4096)
    platform = GpuPlatform(SimRuntime())
    device, copies = platform.bind(0), Queue()
    sender = PinnedRing(platform.runtime, device)
    values = [torch.randn(n) for n in (10, 3000, 700, 5000, 1)]
    with copies:
        sent = [sender.upload(v) for v in values]
    sender.close()
    behind(copies, gpu.queue)
    doubled = [x * 2 for x in sent]
    for x in sent:
        x.record_stream(gpu.queue)
    del sent
    assert all(torch.equal(x.cpu(), v * 2) for x, v in zip(doubled, values, strict=True))


STEPS = st.lists(
    st.tuples(st.sampled_from(["read", "write", "event", "sync"]), st.integers(0, 2), st.integers(0, 2)), max_size=14
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_races_are_those_of_a_model(steps: list[tuple[str, int, int]]) -> None:
    """Against a plain model: everything that any earlier event or wait of the host carried is known, nothing else."""
    with simulated() as gpu:
        queues = [gpu.queue, Queue(), Queue()]
        buffers = [ones() for _ in range(3)]
        gpu.synchronize()
        known: list[set[int]] = [set(), set(), set()]  # by queue: numbers of the uses that are done before its next
        host: set[int] = set()
        uses: list[tuple[int, int, bool]] = []  # queue, buffer, writes
        for kind, a, b in steps:
            if kind == "event":
                behind(queues[a], queues[b])
                known[b] |= known[a]
            elif kind == "sync":
                queues[a].synchronize()
                host |= known[a]
            else:
                known[a] |= host
                wrong = any(
                    i not in known[a] and buffer == b and (writes or kind == "write")
                    for i, (_, buffer, writes) in enumerate(uses)
                )
                with queues[a]:
                    if wrong:
                        with pytest.raises(SimError):
                            buffers[b].zero_() if kind == "write" else buffers[b].sum()
                        return
                    buffers[b].zero_() if kind == "write" else buffers[b].sum()
                known[a].add(len(uses))
                uses.append((a, b, kind == "write"))
