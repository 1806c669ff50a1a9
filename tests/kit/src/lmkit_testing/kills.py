"""An executor that runs steps while one of its ranks is killed: no wrong token, no hang, one Failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Timer
from time import monotonic, sleep

from lmkit.api import (
    EngineDead,
    Executor,
    Failure,
    NewRow,
    RowWork,
    SamplingParams,
    StepPlan,
)

from lmkit_testing.executor import ExecutorConformance, tiny_model

LENGTH = 30  # tokens of a row, before the next one begins
SECONDS = 10.0  # in which a rank that is gone is one Failure


class Load:
    """Rows of one tiny model. `expected` is what one rank says of each."""

    def __init__(self, directory: Path, executor: str) -> None:
        self.tiny = tiny_model(directory, executor)
        self.expected = self._alone()

    def _alone(self) -> list[int]:
        from lmkit_worker.uniproc import UniprocExecutor

        one = UniprocExecutor(replace(self.tiny[0], wanted={}), *self.tiny[1:])
        ExecutorConformance.ready(one, self.tiny[0])
        said = list(self.row(one, 0))
        one.close()
        return said

    def row(self, executor: Executor, number: int) -> Iterator[int]:
        """The tokens of a row, one after another."""
        new = NewRow("a", number, [5, 6, 7], 3, [[*range(1, 12)]], 0, SamplingParams(temperature=0))
        for i in range(LENGTH):
            work = RowWork("a", number, i + 2 if i else 0, 1 if i else 3, [], True)
            gone = ["a"] if number and not i else []
            plan = StepPlan(number * LENGTH + i, gone=gone, new=[] if i else [new], rows=[work])
            yield ExecutorConformance.step(executor, plan).tokens[0][0]

    def killed(self, executor: Executor, kill: Callable[[], object], after: float) -> Failure:
        """Gets the executor ready, and runs rows; `after` seconds later calls `kill`. Returns the one failure.

        Raises AssertionError for a wrong token, a second failure, or one that comes late.
        """
        failures: list[Failure] = []
        executor.on_failure(failures.append)
        ExecutorConformance.ready(executor, self.tiny[0])
        timer = Timer(after, kill)
        began = monotonic()
        timer.start()
        with suppress(EngineDead):
            self._run(executor)
        took = monotonic() - began - after
        assert took < SECONDS, f"it took {took:.1f} s to notice"
        timer.join()
        while not failures and monotonic() - began - after < SECONDS:
            sleep(0.01)  # a thread tells it, when all ranks were told to end
        assert len(failures) == 1
        return failures[0]

    def _run(self, executor: Executor) -> None:
        number = 0
        while True:
            for token, expected in zip(self.row(executor, number), self.expected, strict=True):
                assert token == expected, f"row {number} has another token than one rank would say"
            number += 1
