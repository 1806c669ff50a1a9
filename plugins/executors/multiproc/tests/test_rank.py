"""A rank whose device is still at work when the next order comes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from threading import Event, Thread

import pytest
from lmkit.api import Reply, StepPlan, StepResult, WorkAhead
from lmkit_multiproc.messages import (
    Answered,
    Command,
    Forward,
    Order,
    Raised,
    Report,
    Sample,
    Sampled,
    Told,
    decode_report,
    encode,
    send_whole,
)
from lmkit_multiproc.rank import Rank
from lmkit_worker.runner import Unread

WAIT = 10.0  # seconds until what ought to come has not


class Point:
    """Event of a device: it has passed when the test says so. `error`: what waiting raises."""

    def __init__(self) -> None:
        self.passed = Event()
        self.error: Exception | None = None

    def query(self) -> bool:
        if self.passed.is_set() and self.error is not None:
            raise self.error
        return self.passed.is_set()

    def wait(self) -> None:
        assert self.passed.wait(WAIT)
        if self.error is not None:
            raise self.error


class Device:
    """A worker whose steps are done when the test says so."""

    def __init__(self, points: dict[int, Point]) -> None:
        self.points, self.followed = points, []
        self.before: Unread | None = None
        self.news = Event()

    def _note(self, *what: object) -> None:
        self.followed.append(what)
        self.news.set()

    def forward(self, plan: StepPlan) -> None:
        self._note("forward", plan.step)
        if plan.step == 13:
            raise RuntimeError("no such block")

    def sample(self, step: int, masks: None) -> Unread:
        result = StepResult(step, [])
        self.before = Unread(result, self.points[step], lambda: result.tokens.append([step]), self.before)
        return self.before

    def told(self, step: int, tokens: list[list[int]]) -> None:
        self._note("told", step)

    def control(self, command: object) -> Reply:
        self._note("control")
        return Reply(True)

    def until(self, *what: object) -> None:
        self.news.clear()
        while what not in self.followed:
            assert self.news.wait(WAIT), self.followed
            self.news.clear()


class Orders:
    """Gives them, and hears what is reported."""

    def __init__(self, device: Device) -> None:
        mine, theirs = socket.socketpair()
        self.connection, self.device = Connection(mine.detach()), device
        rank = Rank(0, Connection(theirs.detach()))
        rank._worker = device  # type: ignore[assignment]
        self.thread = Thread(target=rank.run)
        self.thread.start()

    def give(self, *orders: Order) -> None:
        for order in orders:
            self.connection.send_bytes(encode(order))

    def step(self, number: int) -> None:
        self.give(Forward(StepPlan(number)), Sample(number, None))

    def heard(self, wait: float = WAIT) -> Report | None:
        return decode_report(self.connection.recv_bytes()) if self.connection.poll(wait) else None


@pytest.fixture
def orders() -> Iterator[Orders]:
    made = Orders(Device({step: Point() for step in range(20)}))
    yield made
    for point in made.device.points.values():
        point.passed.set()
    made.connection.close()
    made.thread.join(WAIT)
    assert not made.thread.is_alive()


@pytest.mark.parametrize("size", [0, 1, 16384, 16385, 1 << 20])
def test_frames_are_those_of_connections(size: int) -> None:
    mine, theirs = (Connection(end.detach()) for end in socket.socketpair())
    frame = bytes(i % 251 for i in range(size))
    with ThreadPoolExecutor(1) as pool, mine, theirs:
        sent = pool.submit(send_whole, frame, mine)  # more than the socket holds
        assert theirs.recv_bytes() == frame
        sent.result(WAIT)


def said(step: int) -> Sampled:
    return Sampled(StepResult(step, [[step]]))


def test_the_next_step_is_prepared_while_the_device_works(orders: Orders) -> None:
    device = orders.device
    for step in range(8):
        orders.step(step)
        device.until("forward", step)  # while the one before is not done
        assert orders.heard(0) is None
        if step:
            device.points[step - 1].passed.set()
            assert orders.heard() == said(step - 1)
    device.points[7].passed.set()
    assert orders.heard() == said(7)


def test_a_device_that_is_done_at_once(orders: Orders) -> None:
    for step in range(4):
        orders.device.points[step].passed.set()
        orders.step(step)
        assert orders.heard() == said(step)


def test_other_orders_wait_for_the_steps_before_them(orders: Orders) -> None:
    orders.step(0)
    orders.step(1)
    orders.device.until("forward", 1)
    orders.give(Told(0, [[3]]))
    orders.device.points[0].passed.set()
    assert orders.heard() == said(0)
    orders.device.until("told", 0)  # with the other one still at work
    orders.give(Command(WorkAhead()))
    assert orders.heard(0.05) is None
    orders.device.points[1].passed.set()
    assert orders.heard() == said(1)
    assert orders.heard() == Answered(Reply(True))
    orders.step(2)  # what was read without being waited for is not taken for this one
    assert orders.heard(0.05) is None
    orders.device.points[2].passed.set()
    assert orders.heard() == said(2)


@pytest.mark.parametrize("soon", [False, True])
def test_errors_of_the_device_are_those_of_their_step(orders: Orders, soon: bool) -> None:
    orders.device.points[0].error = RuntimeError("lost")
    if soon:
        orders.device.points[0].passed.set()
    orders.step(0)
    orders.step(1)
    orders.device.until("forward", 1)
    orders.device.points[0].passed.set()
    report = orders.heard()
    assert isinstance(report, Raised)
    assert (report.step, report.early) == (0, False)
    orders.device.points[1].passed.set()
    assert orders.heard() == said(1)


def test_a_step_that_could_not_begin_is_said_at_once(orders: Orders) -> None:
    """Before what was begun is done: other ranks must not take part in what comes next."""
    orders.step(0)
    orders.step(13)
    report = orders.heard()
    assert isinstance(report, Raised)
    assert (report.step, report.early) == (13, True)
    orders.device.points[0].passed.set()
    assert orders.heard() == said(0)


def test_nothing_is_left_when_orders_end(orders: Orders) -> None:
    orders.step(0)
    orders.device.until("forward", 0)
    orders.connection.close()
    orders.thread.join(WAIT)
    assert not orders.thread.is_alive()
