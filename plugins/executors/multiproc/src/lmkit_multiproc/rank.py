"""One rank: `python -m lmkit_multiproc.rank RANK ORDERS LIFE`, where both are sockets that it inherits.

Orders come in the one; nothing ever comes in the other, but when it closes the process ends at once, also in the middle
of native code: whoever started it is gone, or wants it gone.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import sys
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from select import POLLIN, poll
from threading import Thread
from typing import TYPE_CHECKING

from lmkit.api import Choice, LmkitError, Reply, StepResult, blame, info_of

from lmkit_multiproc.messages import (
    Answered,
    Command,
    Configure,
    Configured,
    Forward,
    Load,
    Loaded,
    Order,
    Phase,
    Raised,
    Report,
    Sample,
    Sampled,
    Told,
    decode_order,
    encode,
    first_with_head,
)

if TYPE_CHECKING:
    from lmkit_worker.runner import Unread
    from lmkit_worker.worker import Worker

log = logging.getLogger("lmkit.multiproc")


class Rank:
    """Follows orders with a Worker, one after another. What a device still works on is read when it is done, and
    orders that come before that are followed meanwhile."""

    def __init__(self, rank: int, orders: Connection) -> None:
        self.rank, self._orders = rank, orders
        self._worker: Worker | None = None
        self._first = 0  # of those that have the head
        self._choices: tuple[Choice, ...] = ()  # the plugins that errors may come from
        self._failed: dict[int, BaseException] = {}  # step -> what its forward pass raised
        self._unread: deque[Unread] = deque()
        self._watch: Watch | None = None  # once a device was not done at once

    def run(self) -> None:
        """Until there are no more orders. What one raises is reported, and the next is followed."""
        while True:
            try:
                self._read_done()
                order = decode_order(self._orders.recv_bytes())
            except EOFError:
                return
            try:
                report = self.follow(order)
            except BaseException as e:  # a plugin may raise SystemExit, too
                step = order.step if isinstance(order, Sample) else None
                report = self._raised(e, order, step, step is not None and self._failed.pop(step, None) is e)
            if report is not None:
                self._send(report)

    def follow(self, order: Order) -> Report | None:
        if isinstance(order, Load):
            return self._load(order)
        worker = self._worker
        assert worker is not None, "Load comes first"
        match order:
            case Configure(kv, limits):
                worker.configure_kv(kv, limits)
                gc.freeze()  # what lives now lives as long as the process
                return Configured()
            case Forward(plan):
                try:
                    worker.forward(plan)
                except BaseException as e:
                    self._failed[plan.step] = e
                return None
            case Sample(step, masks):
                if error := self._failed.get(step):
                    raise error
                self._unread.append(worker.sample(step, masks))
                return None
            case Told(step, tokens):
                self._read(step)
                worker.told(step, tokens)
                return None
            case Command(control):
                self._read()
                reply: Reply = worker.control(control)
                return Answered(reply)

    def _read_done(self) -> None:
        """Reports what is done, until there is an order or nothing left."""
        while self._unread:
            oldest = self._unread[0]
            if not oldest.is_done():
                self._watch = self._watch or Watch(self._orders.fileno())
                if not self._watch.done_first(oldest):
                    return
            self._read(oldest.result.step)

    def _read(self, last: int | None = None) -> None:
        """Reports steps, up to that one or all, in their order; waits for the device."""
        while self._unread and (last is None or self._unread[0].result.step <= last):
            unread = self._unread.popleft()
            try:
                result: StepResult = unread.read()
            except BaseException as e:
                self._send(self._raised(e, unread, unread.result.step))
            else:
                if self.rank == self._first:
                    self._send(Sampled(result))

    def _raised(self, e: BaseException, at: object, step: int | None, early: bool = False) -> Raised:
        if not isinstance(e, LmkitError):
            log.error("rank %d: %s", self.rank, type(at).__name__, exc_info=e)
        loading = isinstance(at, Load)
        return Raised(info_of(blame(e, self._choices, in_full=loading)), step, early)

    def _load(self, order: Load) -> Loaded:
        from lmkit_worker.worker import Worker

        self._choices = order.resolved.all_choices()
        progress = self._progress if self.rank == 0 else None
        worker = Worker(order.config, order.resolved, order.checkpoint, progress, rank=self.rank, places=order.places)
        self._first = first_with_head(order.config)
        facts = worker.load()
        self._worker = worker
        return Loaded(facts)

    def _progress(self, phase: str, done: int, total: int, unit: str = "B") -> None:
        self._send(Phase(phase, done, total, unit))

    def _send(self, report: Report) -> None:
        self._orders.send_bytes(encode(report))


class Watch:
    """Waits for the device and for orders at once: a thread waits for the one, whoever asks for both."""

    def __init__(self, orders: int) -> None:
        """`orders`: what they come through."""
        self._given: SimpleQueue[Unread] = SimpleQueue()
        self._last: Unread | None = None  # that the thread was given
        self._done: Unread | None = None  # that it waited for last
        self._orders, (self._told, self._tells) = orders, os.pipe()
        self._news = poll()
        for fd in (orders, self._told):
            self._news.register(fd, POLLIN)
        Thread(target=self._wait, name="lmkit-device", daemon=True).start()

    def done_first(self, step: Unread) -> bool:
        """Whether the device has done it before there is an order."""
        if step is not self._last:
            self._last = step
            self._given.put(step)
        while True:
            news = {fd for fd, _ in self._news.poll()}
            if self._told in news:
                os.read(self._told, 64)  # also of steps that were read without being waited for here
            if self._done is step:
                return True
            if self._orders in news:
                return False

    def _wait(self) -> None:
        while True:
            step = self._given.get()
            with suppress(Exception):  # reading it raises that
                step.wait()
            self._done = step
            os.write(self._tells, b".")


def _end_with(life: int) -> None:
    """Blocks until the other end of `life` is closed, in whatever way, and ends the process."""
    try:
        os.read(life, 1)
    finally:
        os._exit(0)


def main(rank: int, orders: int, life: int) -> None:
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever started the ranks decides
        signal.signal(number, signal.SIG_IGN)
    for fd in (orders, life):
        os.set_inheritable(fd, False)
    Thread(target=_end_with, args=(life,), name="lmkit-life", daemon=True).start()
    logging.basicConfig(format=f"%(asctime)s rank {rank} %(levelname)s %(message)s", level=logging.WARNING)
    with Connection(orders) as connection:
        Rank(rank, connection).run()
    os._exit(0)  # nothing is left to be done, and others may still use what exit would tear down


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
