"""Logits processors of plugins, by the name under which requests ask for them (params.extra)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
from lmkit.api import LogitsProcessor, SampleContext

from lmkit_worker.sampling.logprobs import row_index

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmkit.api import SamplingParams
    from torch import Tensor


log = logging.getLogger("lmkit.engine")


class Processors:
    """Which processor is interested in which slot. A processor sees only rows that named it and that it accepted."""

    def __init__(self, processors: Mapping[str, LogitsProcessor]) -> None:
        self._all = dict(processors)
        self._slots: dict[str, set[int]] = {name: set() for name in processors}  # membership only, never iterated
        self.active: dict[str, int] = {"logits": 0, "probs": 0}  # interested (processor, slot) pairs per stage

    def add(self, slot: int, params: SamplingParams, prompt: Sequence[int]) -> None:
        for name in params.extra:
            processor = self._all.get(name)
            if processor is not None and processor.add(slot, params, prompt):
                self._slots[name].add(slot)
                self.active[processor.stage] += 1

    def remove(self, slot: int) -> None:
        for name, slots in self._slots.items():
            if slot in slots:
                slots.remove(slot)
                self._all[name].remove(slot)
                self.active[self._all[name].stage] -= 1

    def clear(self) -> None:
        """Forgets all slots, whatever state they are in: after a failed step a processor may not know them."""
        for name, slots in self._slots.items():
            for slot in sorted(slots):
                try:
                    self._all[name].remove(slot)
                except Exception as error:
                    log.error("logits processor %s did not forget slot %d", name, slot, exc_info=error)
            slots.clear()
        self.active = {"logits": 0, "probs": 0}

    def apply(
        self, stage: Literal["logits", "probs"], x: Tensor, slots: np.ndarray, positions: np.ndarray,
        greedy: np.ndarray, text: Callable[[int], Sequence[int]],
    ) -> None:  # fmt: skip
        """In place on x [S, V]; greedy rows skip stage "probs", and processors that keep the argmax.

        `text`: row of x -> all tokens before the one drawn of it.
        """
        for name, processor in self._all.items():
            if processor.stage != stage or not self._slots[name]:
                continue
            wanted = [
                i for i, slot in enumerate(slots.tolist())
                if slot in self._slots[name] and not (greedy[i] and (processor.keeps_argmax or stage == "probs"))
            ]  # fmt: skip
            if wanted:
                index = row_index(wanted, x.device)
                part, places = x[index], (slots[wanted].tolist(), positions[wanted].tolist())
                processor.apply(part, SampleContext(*places, partial(_text, text, wanted)))
                x[index] = part


def _text(text: Callable[[int], Sequence[int]], wanted: Sequence[int], row: int) -> Sequence[int]:
    return text(wanted[row])
