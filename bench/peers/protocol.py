"""How the driver talks to an engine: one JSON object per line on stdin, one in answer on stdout.

    {"do": "load", ...Load}                                  -> {"facts": {...}}     what it says of itself
    {"do": "run", "prompts": [[ids], ...], "tokens": n}      -> {"tokens": [[seconds, ...], ...]}
    end of input                                                the process ends

All prompts of a run are handed over at once; the answer has, for each, the seconds after that at which each of its
output tokens was there. Greedy, ends ignored. An answer {"error": text} says why something did not work.

This file and the adapters beside it run in the environments of the peers: standard library only, besides the peer.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol


@dataclass(frozen=True)
class Load:
    """What to load. The engine must hold `max_rows` requests of `max_length` tokens at once."""

    model: str  # a folder, or a GGUF file
    weights: str  # bf16, bf16 plain, int8, w8a8, int4, as in the file
    threads: int
    max_length: int
    max_rows: int


class Engine(Protocol):
    """May have `facts`, a dict of numbers: "weight bytes", "kv bytes"."""

    def run(self, prompts: list[list[int]], tokens: int) -> list[list[float]]: ...


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began = perf_counter()

    def __call__(self) -> float:
        return perf_counter() - self._began


def serve(load: Callable[[Load], Engine]) -> None:
    """Answers the driver until its end of the pipe closes. What libraries print to stdout goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine: Engine | None = None
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        try:
            if do == "load":
                engine = load(Load(**request))
                answer: dict[str, object] = {"facts": getattr(engine, "facts", {})}
            else:
                assert engine is not None, "run before load"
                answer = {"tokens": engine.run(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)  # some engines hang in their destructors
