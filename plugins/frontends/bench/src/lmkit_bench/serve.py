"""Load on a server: closed loop (so many clients, each waiting for its answer) and open loop (arrivals of a Poisson
process, whoever waits). A closed loop hides queueing: a slow server is simply asked less often. Use both.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Literal

from lmkit.api import EngineError

from lmkit_bench.client import Client
from lmkit_bench.result import Metric
from lmkit_bench.stats import Slo, Timing, goodput, percentile
from lmkit_bench.workload import Prompt


@dataclass(frozen=True, slots=True)
class Load:
    """`value` clients at once (kind "concurrency"), or arrivals per second (kind "rate")."""

    kind: Literal["concurrency", "rate"]
    value: float

    def __str__(self) -> str:
        return f"{self.kind} {self.value:g}"


Send = Callable[[Prompt], Awaitable[Timing]]
Done = Callable[[Timing], None]

PERCENTILES = (50, 90, 99)
KEPT = 0.95  # of the requests: what a rate must do to count as within the SLO
MAX_DOUBLINGS = 12


async def closed_loop(
    send: Send, prompts: Sequence[Prompt], concurrency: int, done: Done = lambda timing: None
) -> list[Timing]:
    """Every prompt once, `concurrency` at a time. Timings in the order of the prompts."""
    timings: dict[int, Timing] = {}
    waiting = iter(enumerate(prompts))

    async def client() -> None:
        for number, prompt in waiting:
            timings[number] = await send(prompt)
            done(timings[number])

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(prompts))):
            group.create_task(client())
    return [timings[number] for number in range(len(prompts))]


async def open_loop(
    send: Send, prompts: Sequence[Prompt], rate: float, seed: int = 0, done: Done = lambda timing: None
) -> list[Timing]:
    """Every prompt once, at the times of a Poisson process of `rate` requests per second."""
    arrivals = random.Random(seed)
    began, at = perf_counter(), 0.0

    async def one(prompt: Prompt) -> Timing:
        timing = await send(prompt)
        done(timing)
        return timing

    async with asyncio.TaskGroup() as group:
        tasks = []
        for prompt in prompts:
            tasks.append(group.create_task(one(prompt)))
            at += arrivals.expovariate(rate)
            await asyncio.sleep(max(0.0, began + at - perf_counter()))
    return [task.result() for task in tasks]


async def run_loads(
    client: Client,
    loads: Sequence[Load],
    prompts: Callable[[Load, int], Sequence[Prompt]],
    *,
    slo: Slo | None = None,
    seed: int = 0,
    advance: Callable[[], None] = lambda: None,
    find: bool = False,
) -> dict[str, Metric]:
    """One load after the other, after a request that warms up. `prompts(load, number)` are those of each. `find`: also
    the greatest rate at which the SLO is kept.

    Raises EngineError when the server does not answer, or no request of a load succeeds.
    """
    found: dict[str, Metric] = {}
    async with client:
        await client.open()
        warm = await client.complete(replace(prompts(loads[0], len(loads))[0], num_output=2))
        if not warm.ok:
            raise EngineError(f"the first request failed: {warm.error}", fix="see the log of the server")
        for number, load in enumerate(loads):
            work, done = prompts(load, number), lambda timing: advance()
            if load.kind == "concurrency":
                timings = await closed_loop(client.complete, work, int(load.value), done)
            else:
                timings = await open_loop(client.complete, work, load.value, seed, done)
            found |= metrics(timings, slo, f"{load}/")
        if find and slo is not None:
            number = len(loads)

            async def share(rate: float) -> float:
                nonlocal number
                number += 1
                timings = await open_loop(client.complete, prompts(Load("rate", rate), number), rate, seed)
                return sum(map(slo.kept_by, timings)) / len(timings)

            rates = [load.value for load in loads if load.kind == "rate"]
            best = await greatest_rate(share, rates[0] if rates else 1.0)
            found["greatest rate within the SLO"] = Metric("req/s", "higher", [best])
    return found


async def greatest_rate(share: Callable[[float], Awaitable[float]], start: float, steps: int = 4) -> float:
    """The greatest rate, in requests per second, at which KEPT of the requests keep the SLO: doubled or halved from
    `start` until it is enclosed, then `steps` bisections on a logarithmic scale. 0.0: none was found.

    `share(rate)`: how many of the requests kept it.
    """
    rate, good, bad = start, 0.0, 0.0
    for _ in range(MAX_DOUBLINGS):
        if await share(rate) >= KEPT:
            good = rate
            if bad:
                break
            rate *= 2
        else:
            bad = rate
            if good:
                break
            rate /= 2
    for _ in range(steps if good and bad else 0):
        middle = (good * bad) ** 0.5
        if await share(middle) >= KEPT:
            good = middle
        else:
            bad = middle
    return good


def metrics(timings: Sequence[Timing], slo: Slo | None = None, label: str = "") -> dict[str, Metric]:
    """The figures of one run, each named with `label` in front. Raises EngineError when nothing succeeded.

    A failed request counts in `errors` and against the goodput; its times count nowhere.
    """
    good = [t for t in timings if t.ok]
    if not good:
        raise EngineError(f"no request succeeded; the first one: {timings[0].error}", fix="see the log of the server")
    seconds = max(t.events[-1] for t in good) - min(t.sent for t in timings)
    num_output = sum(t.num_tokens for t in good)
    num_input = sum(t.num_prompt_tokens for t in good)
    rates = {
        "requests": Metric("req/s", "higher", [len(good) / seconds]),
        "output": Metric("tok/s", "higher", [num_output / seconds]),
        "total": Metric("tok/s", "higher", [(num_output + num_input) / seconds]),
        "errors": Metric("requests", "lower", [float(len(timings) - len(good))]),
    }
    if slo is not None:
        rates["goodput"] = Metric("req/s", "higher", [goodput(timings, slo, seconds)])
    times = {
        "ttft": [t.ttft for t in good],
        "tpot": [t.tpot for t in good if t.tpot is not None],
        "itl": [gap for t in good for gap in t.itl],
        "e2e": [t.e2e for t in good],
    }
    found = rates | {name: Metric("s", "lower", values) for name, values in times.items() if values}
    return {f"{label}{name}": metric for name, metric in found.items()}


def summary(metric: Metric) -> dict[str, float]:
    """Mean and percentiles of one metric."""
    values = metric.samples
    return {"mean": sum(values) / len(values)} | {f"p{q}": percentile(values, q) for q in PERCENTILES}
