"""Graphs of decode steps: captured once per number of rows, then replayed in one launch."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from lmkit.api import EngineError, NullGraphs, StepInputs

from lmkit_gpu.runtime import Runtime

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("lmkit.platform.gpu")


@dataclass(slots=True)
class Graph:
    """What is replayed, the hidden states that it writes, and where its inputs lie."""

    replay: Callable[[], None]
    output: Tensor
    addresses: tuple[int, ...]


def buckets(max_rows: int) -> list[int]:
    """Numbers of rows for which there is a graph: close together where a row costs most of a step."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows + 1, 32)]
    return [*(n for n in steps if n < max_rows), max_rows]


class GpuGraphs(NullGraphs):
    """Graphs by bucket of rows; a step has rows added that stand for nothing, up to the next bucket.

    Every tensor that a step's inputs hold has the same address in each step of the same number of rows: the buffers of
    the input builder and of the planners, and the KV cache. The first step of a bucket runs directly, before the first
    request, so that kernels are compiled and chosen outside of a capture; the second is captured. What is captured is
    told apart by the function that runs: one and the same object as long as it does the same.
    """

    def __init__(self, runtime: Runtime, max_rows: int) -> None:
        self.runtime, self.sizes = runtime, buckets(max_rows)
        # By what was captured and number of rows; None: run once. A graph lives as long as the function does.
        self.graphs: WeakKeyDictionary[Callable[[StepInputs], Tensor], dict[int, Graph | None]] = WeakKeyDictionary()

    def num_rows(self, n: int) -> int:
        return self.sizes[bisect_left(self.sizes, n)]

    def run(self, forward: Callable[[StepInputs], Tensor], x: StepInputs) -> Tensor:
        """Hidden states that the next step does not overwrite."""
        if not x.capture or x.embeds is not None:
            return forward(x)
        num_rows = x.token_ids.shape[0]
        graphs = self.graphs.get(forward)
        if graphs is None:
            graphs = self.graphs[forward] = {}
        if num_rows not in graphs:
            graphs[num_rows] = None
            return forward(x)
        addresses = (x.token_ids.data_ptr(), x.positions.data_ptr(), *(plan.slots.data_ptr() for plan in x.attn))
        if x.adapters is not None:
            addresses += (x.adapters.data_ptr(),)
        if x.state is not None:
            addresses += (x.state.slots.data_ptr(), x.state.query_start.data_ptr())
        graph = graphs[num_rows]
        if graph is None:
            replay, output = self.runtime.capture(lambda: forward(x))
            graph = graphs[num_rows] = Graph(replay, output, addresses)
            log.debug("captured a decode step of %d rows", num_rows)
        if graph.addresses != addresses:
            raise EngineError(f"the inputs of a captured step of {num_rows} rows have moved")
        graph.replay()
        return graph.output.clone()
