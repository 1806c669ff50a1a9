"""An engine in this process, driven with token ids for a limited time."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Any

from lmkit.api import EngineRequest, SamplingParams
from lmkit.config import EngineConfig
from lmkit.config.environment import adopt_environment
from lmkit.engine.platform import platform_environment
from lmkit.plugins.resolve import resolve


@dataclass(frozen=True)
class Played:
    """What came of some prompts. Seconds since the first was handed over."""

    tokens: list[list[int]]  # of each prompt
    times: list[list[float]]  # when each of them was there
    steps: list[float]  # when each step that gave something ended
    ended: bool  # False: time was over before

    @property
    def first(self) -> float:
        """When the last of the prompts had its first token."""
        return max(times[0] for times in self.times)

    @property
    def step(self) -> float:
        """Seconds of a decode step, the mean of those behind the last first token."""
        later = [at for at in self.steps if at > self.first]
        return (later[-1] - self.first) / len(later)


class Engine:
    """The engine of a configuration."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises what prevents it from starting."""
        resolved, checkpoint, _ = resolve(config)
        adopt_environment(platform_environment(config, resolved))
        from lmkit.engine.build import build_engine

        # Of several for one purpose the first is asked first.
        self.choices = {f"{c.kind} {c.component}".strip(): c.name for c in reversed(resolved.choices)}
        self.engine = build_engine(config, resolved, checkpoint, None)
        self._numbers = count()

    @property
    def facts(self) -> Any:
        return self.engine.facts

    def play(self, prompts: Sequence[Sequence[int]], num_output: int, seconds: float = 1e9) -> Played:
        """Greedy tokens of all prompts at once, ends ignored. After `seconds` what is left is given up."""
        core = self.engine.core
        ids = [f"r{next(self._numbers)}" for _ in prompts]
        where = {id: i for i, id in enumerate(ids)}
        tokens: list[list[int]] = [[] for _ in ids]
        times: list[list[float]] = [[] for _ in ids]
        steps, began, ended = [], perf_counter(), True
        for id, prompt in zip(ids, prompts, strict=True):
            core.add(
                EngineRequest(id, list(prompt), SamplingParams(max_tokens=num_output, temperature=0, ignore_eos=True))
            )
        while core.has_work():
            events = core.step()
            now = perf_counter() - began
            if events:
                steps.append(now)
            for event in events:
                if event.error is not None:
                    raise RuntimeError(event.error.message)
                tokens[where[event.id]] += event.tokens
                times[where[event.id]] += [now] * len(event.tokens)
            if ended and now > seconds:
                ended = False
                for id in ids:
                    core.abort(id)
        return Played(tokens, times, steps, ended)

    def close(self) -> None:
        self.engine.close()


@contextmanager
def opened(config: EngineConfig) -> Iterator[Engine]:
    engine = Engine(config)
    try:
        yield engine
    finally:
        engine.close()
        gc.collect()


def prompts(number: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Random prompts, of which no two begin alike."""
    import random

    draw = random.Random(seed)
    return [[draw.randrange(3, vocab) for _ in range(length)] for _ in range(number)]
