"""Ten times the load that a server can take: what it answers, how soon it refuses, what a heavy key costs another.

    python bench/overload.py [--seconds 10] [--rounds 3] [-- options of lmkit serve]

Starts `lmkit serve` with two keys and `--scheduler fair`. Each round measures, one after the other: the peak (as many
clients as there are places), the same in an open loop at ten times that rate, the light key alone, and the light key
beside a heavy one at ten times the peak. Client and server share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from statistics import median
from time import perf_counter

from lmkit_bench.client import Client
from lmkit_bench.result import machine
from lmkit_bench.server import ServerProcess
from lmkit_bench.stats import Timing, percentile
from lmkit_bench.workload import Prompt, random_prompts

ROWS, WAITING, NUM_INPUT, NUM_OUTPUT = 16, 48, 32, 32


class Tally:
    """What came of the requests of one phase."""

    def __init__(self) -> None:
        self.good: list[Timing] = []
        self.refusals: list[float] = []  # seconds until the refusal
        self.failed: list[str] = []

    def count(self, timing: Timing, seconds: float) -> None:
        if timing.ok:
            self.good.append(timing)
        elif timing.error.startswith(("HTTP 503", "HTTP 429")):
            self.refusals.append(seconds)
        else:
            self.failed.append(timing.error)


async def one(client: Client, prompt: Prompt, tally: Tally) -> None:
    began = perf_counter()
    timing = await client.complete(prompt)
    tally.count(timing, perf_counter() - began)


def prompts() -> Prompt:
    return random_prompts(1, NUM_INPUT, NUM_OUTPUT, seed=random.randrange(1 << 40))[0]


async def closed(client: Client, clients: int, seconds: float) -> Tally:
    """So many clients, each asks again as soon as it is answered."""
    tally, end = Tally(), perf_counter() + seconds

    async def ask() -> None:
        while perf_counter() < end:
            await one(client, prompts(), tally)

    await asyncio.gather(*(ask() for _ in range(clients)))
    return tally


async def opened(client: Client, rate: float, seconds: float) -> Tally:
    """Poisson arrivals."""
    tally, began, at = Tally(), perf_counter(), 0.0
    async with asyncio.TaskGroup() as group:
        while at < seconds:
            group.create_task(one(client, prompts(), tally))
            at += random.expovariate(rate)
            await asyncio.sleep(max(0.0, began + at - perf_counter()))
    return tally


def rate_of(tally: Tally) -> float:
    """Answers per second between the first that ended and the last."""
    ends = sorted(t.events[-1] for t in tally.good)
    return (len(ends) - 1) / (ends[-1] - ends[0])


async def measure(server: ServerProcess, seconds: float) -> dict[str, float]:
    found: dict[str, float] = {}
    async with (
        Client(server.url, api_key="heavy", ignore_eos=True) as heavy,
        Client(server.url, api_key="light", ignore_eos=True) as light,
    ):
        await heavy.open()
        await light.open()
        await closed(heavy, ROWS, 1.0)
        peak = await closed(heavy, ROWS + WAITING // 2, seconds)
        before = server.memory()
        over = await opened(heavy, 10 * rate_of(peak), seconds)
        found |= {
            "peak, req/s": rate_of(peak), "at 10x, req/s": rate_of(over),
            "share of the peak": rate_of(over) / rate_of(peak),
            "refused": len(over.refusals), "refusal p50, ms": 1e3 * median(over.refusals),
            "refusal p99, ms": 1e3 * percentile(over.refusals, 99), "failed": len(over.failed),
            "slowest accepted, s": max(t.e2e for t in over.good), "growth, MiB": (server.memory() - before) / 2**20,
        }  # fmt: skip
        alone = await closed(light, 1, seconds / 2)
        crowd = asyncio.create_task(opened(heavy, 10 * rate_of(peak), seconds))
        await asyncio.sleep(1.0)
        beside = await closed(light, 1, seconds - 2.0)
        await crowd
        first, second = (percentile([t.ttft for t in tally.good], 99) for tally in (alone, beside))
        found |= {
            "light key alone, p99 TTFT ms": 1e3 * first, "beside a heavy one, p99 TTFT ms": 1e3 * second,
            "slower": second / first, "light key refused": len(beside.refusals),
        }  # fmt: skip
    return found


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=10.0, help="of each phase")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("serve", nargs="*", help="options of lmkit serve")
    given = arguments.parse_args()
    command = [sys.executable, "-m", "lmkit", "serve", *given.serve, "--scheduler", "fair", "--max-rows", str(ROWS)]
    command += ["--max-waiting", str(WAITING), "--api-key", "heavy", "--api-key", "light"]
    with ServerProcess(command) as server:
        server.wait_ready()
        rounds = [asyncio.run(measure(server, given.seconds)) for _ in range(given.rounds)]
        print(server.log() if any(found["failed"] for found in rounds) else "")
    host = machine()
    print(f"{host.processor}, {host.cores} cores; {given.rounds} rounds of {given.seconds:g} s a phase")
    for name in rounds[0]:
        values = [found[name] for found in rounds]
        print(f"| {name} | {median(values):.2f} | {min(values):.2f} to {max(values):.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
