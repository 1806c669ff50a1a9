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
from multiprocessing.connection import Connection
from threading import Thread
from typing import TYPE_CHECKING

from lmkit.api import LmkitError, Reply, StepResult, info_of

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
    from lmkit_worker.worker import Worker

log = logging.getLogger("lmkit.multiproc")


class Rank:
    """Follows orders with a Worker, one after another."""

    def __init__(self, rank: int, orders: Connection) -> None:
        self.rank, self._orders = rank, orders
        self._worker: Worker | None = None
        self._first = 0  # of those that have the head
        self._failed: dict[int, Exception] = {}  # step -> what its forward pass raised

    def run(self) -> None:
        """Until there are no more orders. What one raises is reported, and the next is followed."""
        while True:
            try:
                order = decode_order(self._orders.recv_bytes())
            except EOFError:
                return
            try:
                report = self.follow(order)
            except Exception as e:
                if not isinstance(e, LmkitError):
                    log.error("rank %d: %s", self.rank, type(order).__name__, exc_info=e)
                step = order.step if isinstance(order, Sample) else None
                report = Raised(info_of(e), step, step is not None and self._failed.pop(step, None) is e)
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
                except Exception as e:
                    self._failed[plan.step] = e
                return None
            case Sample(step, masks):
                if error := self._failed.get(step):
                    raise error
                result: StepResult = worker.sample(step, masks).read()
                return Sampled(result) if self.rank == self._first else None
            case Told(step, tokens):
                worker.told(step, tokens)
                return None
            case Command(control):
                reply: Reply = worker.control(control)
                return Answered(reply)

    def _load(self, order: Load) -> Loaded:
        from lmkit_worker.worker import Worker

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
