"""Null objects of optional seams: one rank, no captured graphs, no queue of device work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from lmkit.contracts.execution import StepInputs


class NullGraphs:
    """Runs the model directly."""

    sizes: Sequence[int] = ()

    def num_rows(self, n: int) -> int:
        return n

    def run(self, forward: Callable[[StepInputs], Tensor], x: StepInputs) -> Tensor:
        return forward(x)

    def then(self, function: Callable[[Tensor], Any], hidden: Tensor) -> Any:
        return function(hidden)


class NullEvent:
    """A point in a queue that is always empty."""

    def record(self) -> None:
        """Nothing is queued, so there is nothing to mark."""

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        """Already done."""


class NullCollectives:
    """One rank: every collective returns its input."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        return x

    def send(self, x: Tensor, dst: int) -> None:
        """There is nobody."""

    def receive(self, out: Tensor, src: int) -> Tensor:
        return out
